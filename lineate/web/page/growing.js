// A text that grows is drawn in time that grows with what is new: a block that later lines cannot change is never read or
// made again, and the last one keeps what is certain of it: the lines of code, the items of a list, the words of a paragraph.

import { copyButton, make } from "./dom.js";
import { DEEPEST, FENCE, HEADING, ITEM, begins, closes, inline, withoutIndent } from "./markdown.js";
import { Parts } from "./parts.js";

const CODE_LINES = 64; // lines of code in an element of their own, so that a browser lays out only the last ones again

/** Shows the blocks of a text. */
export class Growing {
  /**
   * @param {Element} parent gets the blocks; it has no other children
   * @param {number} depth how many lists are around it
   */
  constructor(parent, depth = 0) {
    this.parent = parent;
    this.depth = depth;
    this.text = "";
    this.at = 0; // where the first block begins that later lines may change
    this.open = []; // the views of that block and of those after it
  }

  /** Show this text. */
  show(text) {
    if (text === this.text) return;
    if (!continues(text, this.text)) {
      this.parent.replaceChildren();
      this.at = 0;
      this.open = [];
    }
    this.text = text;
    let used = 0;
    let at = this.at;
    for (;;) {
      at = afterBlankLines(text, at);
      if (used === 0) this.at = at;
      const line = text.slice(at, lineEnd(text, at));
      if (line.trim() === "") break;
      const [kind, View, found] = blockOf(line, this.depth);
      if (this.open[used]?.kind !== kind || this.open[used].at !== at) {
        this.close(used);
        const view = new View(found, this.depth);
        this.open.push(Object.assign(view, { kind, at }));
        this.parent.append(view.element);
      }
      const [length, certain] = this.open[used].show(text.slice(at));
      at += length;
      if (certain && used === 0) {
        this.open.shift();
        this.at = at;
      } else {
        used += 1;
      }
    }
    this.close(used);
  }

  /** Remove the open blocks from this one on. */
  close(from) {
    for (const view of this.open.splice(from)) view.element.remove();
  }
}

/** Whether a text begins with what was shown; `startsWith` compares character by character, 20 times as slow. */
export const continues = (text, shown) => text.slice(0, shown.length) === shown;

/** Return what names the block that begins with this line, its class, and what the line says. */
function blockOf(line, depth) {
  const fence = FENCE.exec(line);
  if (fence) return [`code ${fence[0]}`, Code, fence];
  const heading = HEADING.exec(line);
  if (heading) return [heading[1], Heading, heading];
  const item = ITEM.exec(line);
  if (item) return [`${depth < DEEPEST} ${item[1]}${item[2]}`, depth < DEEPEST ? List : DeepList, item];
  return ["paragraph", Paragraph, null];
}

/** Return where a line ends, before its newline. */
function lineEnd(text, from) {
  const end = text.indexOf("\n", from);
  return end < 0 ? text.length : end;
}

/** Return where the first line begins that is not blank, or the last one, which may still get words. */
function afterBlankLines(text, at) {
  for (;;) {
    const end = lineEnd(text, at);
    if (end === text.length || text.slice(at, end).trim() !== "") return at;
    at = end + 1;
  }
}

// Each view has an element and `show(rest)`, which gets the text from the beginning of the block to the end of all, and
// returns the length of the block and whether it is certain: whether the line that ends it is complete.

class Heading {
  constructor([, marks]) {
    this.element = make(`h${Math.min(marks.length + 3, 6)}`);
    this.words = new Words(this.element);
  }

  show(rest) {
    const end = lineEnd(rest, 0);
    this.words.show(HEADING.exec(rest.slice(0, end))[2]);
    return end < rest.length ? [end + 1, true] : [end, false];
  }
}

class Paragraph {
  constructor() {
    this.element = make("p");
    this.words = new Words(this.element);
    this.read = 0; // where the first line begins that may still change
  }

  show(rest) {
    for (;;) {
      const end = lineEnd(rest, this.read);
      const line = rest.slice(this.read, end);
      if (this.read > 0 && (line.trim() === "" || begins(line))) {
        this.words.show(rest.slice(0, this.read - 1));
        return [this.read, end < rest.length];
      }
      if (end === rest.length) {
        this.words.show(rest);
        return [end, false];
      }
      this.read = end + 1;
    }
  }
}

class Code {
  constructor([line, indent, fence, said]) {
    [this.indent, this.fence] = [indent.length, fence];
    this.read = line.length + 1;
    this.lines = 0;
    this.last = document.createTextNode(""); // the line that is not complete
    this.code = make("code", {}, this.last);
    const language = said.trim().split(/\s/)[0];
    const label = language ? `Code, ${language}` : "Code";
    this.element = make("div.code", {},
      make("div.code-head", {}, make("span", { textContent: language || "code" }),
        copyButton(() => this.code.textContent, { className: "plain", "aria-label": "Copy this code" })),
      // Wide code scrolls by itself; the keyboard must reach it for that.
      make("pre", { tabIndex: 0, "role": "region", "aria-label": label }, this.code));
  }

  show(rest) {
    let found = "";
    for (;;) {
      const end = lineEnd(rest, this.read);
      const line = rest.slice(this.read, end);
      const closed = closes(line, this.fence);
      if (closed || end >= rest.length) {
        const begun = this.read <= rest.length && !closed;
        this.put(found);
        this.last.data = begun ? this.newline() + withoutIndent(line, this.indent) : "";
        return [Math.min(end + 1, rest.length), closed && end < rest.length];
      }
      found += this.newline() + withoutIndent(line, this.indent);
      this.read = end + 1;
      this.lines += 1;
      if (this.lines % CODE_LINES === 0) {
        this.put(`${found}\n`);
        found = "";
        this.own = null;
      }
    }
  }

  /** Return what is between the lines before and the next one, if it is not there yet. */
  newline() {
    return this.lines % CODE_LINES === 0 ? "" : "\n";
  }

  /** Add complete lines. */
  put(text) {
    if (text === "") return;
    if (!this.own) this.last.before(make("span.lines", {}, (this.own = document.createTextNode(""))));
    this.own.appendData(text);
  }
}

/** Reads the lines of a list; what becomes of them is up to the class that is derived from it. */
class ListLines {
  constructor([, indent, mark]) {
    this.base = indent.length;
    this.ordered = /\d/.test(mark);
    this.read = 0; // where the first line begins that may still change, or a blank one that may be the last
    this.tail = 0; // where the first line begins after those blank ones
  }

  show(rest) {
    for (;;) {
      const end = lineEnd(rest, this.tail);
      const line = rest.slice(this.tail, end);
      const item = ITEM.exec(line);
      const inside = line.startsWith("  ") || (item !== null && /\d/.test(item[2]) === this.ordered);
      if (line.trim() === "") {
        if (end === rest.length) {
          this.finish(rest);
          return [this.tail, false];
        }
        this.addBlank(line);
      } else if (this.tail > 0 && !inside && (this.tail > this.read || begins(line))) {
        this.finish(rest);
        return [this.tail, end < rest.length];
      } else if (end === rest.length) {
        this.finish(rest, line, item);
        return [end, false];
      } else {
        this.add(line, item);
        this.read = end + 1;
      }
      this.tail = end + 1;
    }
  }
}

class List extends ListLines {
  constructor(first, depth) {
    super(first);
    this.depth = depth;
    this.element = make(this.ordered ? "ol" : "ul");
    if (this.ordered) this.element.start = Number.parseInt(first[2], 10);
    this.item = null; // {element, shown, content, width} of the last complete line
    this.next = null; // of the last line, if it begins another one
    this.between = ""; // the blank lines after the last complete one
  }

  begin(item) {
    const element = make("li");
    this.element.append(element);
    return { element, shown: new Growing(element, this.depth + 1), content: item[3] ?? "", width: item[1].length + item[2].length + 1 };
  }

  /** Whether a line begins an item of this list, rather than of one inside it. */
  isOwn(item) {
    return item !== null && item[1].length < this.base + 2;
  }

  continued({ content, width }, line) {
    return `${content}${this.between}\n${withoutIndent(line, width)}`;
  }

  addBlank(line) {
    this.between += `\n${withoutIndent(line, this.item.width)}`;
  }

  add(line, item) {
    if (this.isOwn(item)) {
      this.item?.shown.show(this.item.content);
      const begun = this.next ?? this.begin(item);
      this.next = null;
      this.item = Object.assign(begun, { content: item[3] ?? "", width: item[1].length + item[2].length + 1 });
    } else {
      this.item.content = this.continued(this.item, line);
    }
    this.between = "";
  }

  /** Show what was added, and the last line if it is inside the list. */
  finish(rest, line = null, item = null) {
    if (line !== null && this.isOwn(item)) {
      this.item?.shown.show(this.item.content);
      this.next ??= this.begin(item);
      this.next.shown.show(item[3] ?? "");
      return;
    }
    this.next?.element.remove();
    this.next = null;
    this.item?.shown.show(line === null ? this.item.content : this.continued(this.item, line));
  }
}

/** A list inside so many others that it is shown as text. */
class DeepList extends ListLines {
  constructor(first) {
    super(first);
    this.element = make("p");
    this.words = new Words(this.element);
  }

  add() {}

  addBlank() {}

  finish(rest, line = null) {
    this.words.show(line === null ? rest.slice(0, Math.min(this.read, rest.length)).replace(/\n$/, "") : rest);
  }
}

/** Shows the words of a paragraph or heading. */
class Words {
  constructor(parent) {
    this.parts = new Parts(parent);
    this.text = "";
    this.certain = 0; // characters whose nodes later words cannot change
  }

  show(text) {
    if (text === this.text) return;
    if (!continues(text, this.text)) {
      this.parts.clear();
      this.certain = 0;
    }
    this.text = text;
    const { nodes, certain, count } = inline(text.slice(this.certain));
    this.parts.add(nodes.slice(0, count), nodes.slice(count));
    this.certain += certain;
  }
}
