// A long paragraph is divided into parts: when it grows, a browser lays out only the last one again.

import { make } from "./dom.js";

export const LINES = 4096; // characters of a part, which ends with the line that it ends in
export const WORDS = 16384; // of a part without such an end, which ends with a word
export const LONGEST = 18432; // of a part without that end either

/** The nodes of an element whose text grows. Those of each complete part are in an element of their own. */
export class Parts {
  /** @param {Element} parent gets the nodes; it has no other children */
  constructor(parent) {
    this.parent = parent;
    this.clear();
  }

  clear() {
    this.parent.replaceChildren();
    this.complete = 0; // how many parts there are before the last one
    this.count = 0; // how many nodes they and the last one are, without those that are replaced
    this.size = 0; // characters of the last part
  }

  /**
   * Add nodes after those that were added before, and show others after them until the next call.
   * @param {(string|Element)[]} nodes stay; a string becomes text
   * @param {(string|Element)[]} others are replaced by the next call
   */
  add(nodes, others = []) {
    const { parent } = this;
    while (parent.childNodes.length > this.count) parent.lastChild.remove();
    for (const node of nodes) {
      if (typeof node === "string") this.addText(node);
      else this.addElement(node);
    }
    parent.append(...others.map((node) => (typeof node === "string" ? document.createTextNode(node) : node)));
  }

  addText(text) {
    let rest = text;
    while (rest !== "") {
      const end = endOfPart(rest, this.size);
      this.put(rest.slice(0, end ?? rest.length));
      if (end === null) return;
      this.close();
      rest = rest.slice(end);
    }
  }

  addElement(element) {
    if (this.size >= WORDS) this.close();
    this.parent.append(element);
    this.count += 1;
    this.size += element.textContent.length;
  }

  put(text) {
    const last = this.count > this.complete ? this.parent.lastChild : null;
    if (last?.nodeType === Node.TEXT_NODE) last.appendData(text);
    else this.parent.append(document.createTextNode(text));
    this.count = this.parent.childNodes.length;
    this.size += text.length;
  }

  /** Move the nodes of the last part into an element of their own. */
  close() {
    const nodes = [...this.parent.childNodes].slice(this.complete);
    this.parent.append(make("span.part", {}, ...nodes));
    this.complete += 1;
    this.count = this.complete;
    this.size = 0;
  }
}

/** Return where in a text a part ends that has `size` characters before it, or null. It does not depend on what follows. */
function endOfPart(text, size) {
  const end = LONGEST - size;
  const near = text.slice(0, end);
  const line = near.indexOf("\n", Math.max(LINES - size, 0));
  const begin = Math.max(WORDS - size, 0);
  const word = near.slice(begin).search(/\s/);
  const found = [line, word < 0 ? -1 : begin + word].filter((at) => at >= 0);
  if (found.length) return Math.min(...found) + 1;
  if (text.length <= end) return null;
  return end + (/[\uDC00-\uDFFF]/.test(text[end]) ? 1 : 0); // not inside a character
}
