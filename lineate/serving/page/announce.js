// What a screen reader says while an answer is written: whole paragraphs, not every token.

import { byId, make } from "./dom.js";

/** Speaks an answer while it grows. */
export class Speaker {
  constructor() {
    this.said = 0;
    byId("announcements").replaceChildren();
  }

  /** Say the paragraphs of `text` that are complete and were not said before. */
  hear(text) {
    const end = text.lastIndexOf("\n\n");
    if (end > this.said) {
      say(text.slice(this.said, end));
      this.said = end;
    }
  }

  /** Say the rest of `text`, and how the answer ended. */
  end(text, how) {
    const rest = text.slice(this.said).trim();
    if (rest) say(rest);
    say(how);
  }
}

/** Have a screen reader say a text when it has finished what it is saying. */
export function say(text) {
  const words = text.trim();
  if (words) byId("announcements").append(make("p", { textContent: words }));
}
