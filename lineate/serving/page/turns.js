// One turn of the conversation as an element that follows its node: text, errors, strip and what can be done with it.

import { directionOf } from "./direction.js";
import { button, copyButton, make } from "./dom.js";
import { Growing, continues } from "./growing.js";
import { Parts } from "./parts.js";
import { strip } from "./strip.js";
import { versions } from "./tree.js";

const STAGE = 16384; // characters of an answer that one call draws
const THOUGHT = /^\s*<think>([\s\S]*?)(?:<\/think>\s*|$)/;
const ENDS = {
  length: "The answer ended at its limit of tokens.",
  time: "The server ended this answer because it took too long.",
  shutdown: "The server is shutting down and ended this answer.",
  content_filter: "The server cut this answer.",
};

const ELSEWHERE = "This answer is being written in another tab.";
const CLOSED = "The page was closed before this answer was complete.";

/** Whether another tab has lately written to this answer. */
const elsewhere = (node) => node.status === "running" && Date.now() - (node.alive ?? 0) < 10_000;

/** Return what an answer thought and what it says; some models think in the text, between <think> and </think>. */
export function thoughtAndText(node) {
  const found = node.role === "assistant" && !node.reasoning ? THOUGHT.exec(node.text) : null;
  if (!found) return [node.reasoning ?? "", node.text];
  return [found[1].trim(), node.text.slice(found[0].length)];
}

/**
 * A turn on the page. Its element stays the same while the conversation changes around it, so that focus, selection and
 * an edit that is being typed survive.
 */
export class Turn {
  /** @param {object} actions functions of (node): edit (with a text), again, fork, answer, version (with a step), key */
  constructor(node, actions) {
    this.actions = actions;
    this.node = node;
    this.signature = "";
    this.stripped = "";
    this.editor = null;
    const who = node.role === "user" ? "You" : "Answer";
    this.thought = make("p");
    this.thoughts = new Parts(this.thought);
    this.thinking = make("details.thinking", { hidden: true }, make("summary", { textContent: "Thinking" }), this.thought);
    this.text = make("div.text", node.role === "user" ? { dir: "auto" } : {});
    this.grown = new Growing(this.text);
    this.complete = true; // whether all of the text is shown
    this.note = make("div.note-slot");
    this.figures = make("div.strip-slot");
    this.actionRow = make("div.actions", { role: "group", "aria-label": node.role === "user" ? "Your turn" : "This answer" });
    this.element = make(`article.turn.${node.role}`, { "data-id": node.id },
      make("h3.who", { textContent: who }), this.thinking, this.text, this.note, this.figures, this.actionRow);
  }

  /**
   * Show the node as it is now.
   * @param {object} around conversation; running: whether this turn is being written; busy: whether any turn of the
   *     conversation is; last: whether it is the last one; before: the answer before it; most: bytes of the largest layer
   */
  update(node, around) {
    this.node = node;
    this.around = around;
    this.grow();
    const among = versions(around.conversation, node);
    const at = among.indexOf(node);
    const signature = JSON.stringify([around.running, around.busy, around.last, at, among.length, node.status, node.error, elsewhere(node)]);
    if (signature !== this.signature) {
      this.signature = signature;
      this.showNote();
      this.showActions(at, among.length);
    }
    const stripped = JSON.stringify([around.running, node.usage, node.timing, around.before?.usage, around.most]);
    if (stripped !== this.stripped) {
      this.stripped = stripped;
      const own = around.running ? null : strip(node, around.before, around.most);
      this.figures.replaceChildren(...(own ? [own] : []));
    }
  }

  /** Show the text that the node has now, or more of it than before: so a long one never holds the page up. */
  grow() {
    const { node } = this;
    if (node.role === "user") {
      if (this.text.textContent !== node.text) this.text.textContent = node.text;
      return;
    }
    const [thought, text] = thoughtAndText(node);
    this.thinking.hidden = thought === "";
    this.showThought(thought);
    const direction = directionOf(text);
    if (this.text.dir !== direction) this.text.dir = direction;
    const from = continues(text, this.grown.text) ? this.grown.text.length : 0;
    this.complete = text.length <= from + STAGE;
    this.grown.show(this.complete ? text : text.slice(0, from + STAGE));
    if (this.around.running) this.element.classList.toggle("waiting", text === "" && thought === "");
  }

  showThought(thought) {
    const shown = this.thought.textContent;
    if (thought === shown) return;
    const more = continues(thought, shown);
    if (!more) this.thoughts.clear();
    this.thoughts.add([more ? thought.slice(shown.length) : thought]);
  }

  showNote() {
    const { node, around } = this;
    this.element.classList.toggle("running", around.running);
    this.element.classList.toggle("waiting", around.running && node.text === "" && !node.reasoning);
    const end = node.usage?.lineate?.stopped_by ?? node.finish;
    const notes = [];
    if (around.running) notes.push(make("p.progress", { textContent: "Reading the prompt …" }));
    else if (node.status === "failed") notes.push(this.errorCard());
    else if (node.status === "stopped") notes.push(make("p.note", { textContent: "You stopped this answer." }));
    else if (node.status === "running") notes.push(make("p.note", { textContent: elsewhere(node) ? ELSEWHERE : CLOSED }));
    else if (ENDS[end]) notes.push(make("p.note", { textContent: ENDS[end] }));
    else if (node.role === "assistant" && node.text === "" && !node.reasoning) notes.push(make("p.note", { textContent: "This answer is empty." }));
    this.note.replaceChildren(...notes);
  }

  errorCard() {
    const { node, actions } = this;
    const { message, status, retryAfter } = node.error;
    const wait = retryAfter ? ` It asks you to wait ${retryAfter} ${retryAfter === 1 ? "second" : "seconds"}.` : "";
    const card = make("div.error", {}, make("p", { textContent: `${message}${wait}` }));
    if (status === 401) card.append(keyForm((key) => actions.key(node, key)));
    else card.append(button("Retry", () => actions.again(node), { disabled: this.around.busy, className: "retry" }));
    return card;
  }

  showActions(at, total) {
    const { node, actions, around } = this;
    const row = [];
    if (total > 1) {
      row.push(make("span.versions", { role: "group", "aria-label": "Versions" },
        button("‹", () => actions.version(node, -1), { "aria-label": "Previous version", disabled: at === 0 || around.busy }),
        make("span", { textContent: `${at + 1} of ${total}` }),
        button("›", () => actions.version(node, 1), { "aria-label": "Next version", disabled: at === total - 1 || around.busy })));
    }
    if (!around.running) {
      if (node.role === "user") {
        if (around.last) row.push(button("Answer this", () => actions.answer(node), { disabled: around.busy, className: "answer" }));
        row.push(button("Edit", () => this.edit(), { disabled: around.busy, className: "edit" }));
      } else if (node.status !== "failed") {
        row.push(button("Regenerate", () => actions.again(node), { disabled: around.busy, className: "again" }));
      }
      row.push(button("Fork", () => actions.fork(node), {
        className: "fork", title: "Begin a new conversation with the turns up to this one",
      }));
      if (node.text !== "") row.push(copyButton(() => thoughtAndText(this.node)[1], { className: "copy" }));
    }
    this.actionRow.replaceChildren(...row);
  }

  /** Let the reader change this turn; sending makes a new version of it, and Escape leaves everything as it was. */
  edit() {
    if (this.editor) return;
    const area = make("textarea", { value: this.node.text, rows: 3, "aria-label": "Edit this turn" });
    const close = () => {
      this.editor.remove();
      this.editor = null;
      this.text.hidden = this.actionRow.hidden = false;
      this.actionRow.querySelector(".edit")?.focus();
    };
    const send = () => {
      const text = area.value.trim();
      if (!text || this.around.busy) return;
      close();
      this.actions.edit(this.node, text);
    };
    this.editor = make("form.editor", {
      onsubmit: (event) => { event.preventDefault(); send(); },
      onkeydown: (event) => {
        if (event.key === "Escape") {
          event.stopPropagation();
          close();
        } else if (sends(event) && event.target === area) {
          event.preventDefault();
          send();
        }
      },
    }, area, make("div.buttons", {}, button("Cancel", close), make("button.primary", { type: "submit", textContent: "Send" })));
    this.text.hidden = this.actionRow.hidden = true;
    this.text.after(this.editor);
    area.style.height = `${Math.min(area.scrollHeight + 4, 400)}px`;
    area.focus();
  }
}

/** Whether this key press in a text field sends it: Enter without Shift, and not to accept a word of an input method. */
export const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

/** Return a form for the API key, which `use` gets. */
export function keyForm(use) {
  const field = make("input", { type: "password", autocomplete: "off", required: true, placeholder: "API key", "aria-label": "API key" });
  return make("form.key", { onsubmit: (event) => { event.preventDefault(); use(field.value.trim()); } },
    field, make("button.primary", { type: "submit", textContent: "Use this key" }));
}
