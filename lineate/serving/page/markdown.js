// A subset of Markdown as elements: paragraphs, headings, lists, code blocks, inline code, bold and italic text.
//
// A model wrote the text, so it is not trusted: elements are built one by one, whatever is not in the subset stays
// text, and nothing here becomes a link, an image or markup.

import { copyButton, make } from "./dom.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^(#{1,6})[ \t]+(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*))?$/;
const DEEPEST = 6; // lists inside lists; deeper ones are shown as text

/**
 * Return the blocks of a text, from its first line to its last.
 * @returns {{kind: string, source: string, language?: string, level?: number}[]} `source` has all that a block shows
 */
export function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const end = lastLine(lines, at);
    found.push(block(lines.slice(at, end)));
    at = end;
  }
  return found;
}

/** Return the index of the line after the block that begins at line `at`. */
function lastLine(lines, at) {
  const fence = FENCE.exec(lines[at]);
  let end = at + 1;
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence[2])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[at])) return end;
  const item = ITEM.exec(lines[at]);
  if (item && item[1].length < 4) return lastOfList(lines, at, item);
  while (end < lines.length && lines[end].trim() !== "" && !begins(lines[end])) end += 1;
  return end;
}

function lastOfList(lines, at, first) {
  const ordered = /\d/.test(first[2]);
  let end = at + 1;
  let blank = false;
  for (let line = at + 1; line < lines.length; line += 1) {
    if (lines[line].trim() === "") {
      blank = true;
      continue;
    }
    const item = ITEM.exec(lines[line]);
    const inside = lines[line].startsWith("  ") || (item !== null && /\d/.test(item[2]) === ordered);
    if (!inside && (blank || begins(lines[line]))) break;
    blank = false;
    end = line + 1;
  }
  return end;
}

const begins = (line) => FENCE.test(line) || HEADING.test(line) || ITEM.test(line);

function closes(line, fence) {
  const mark = line.trim();
  return mark.length >= fence.length && mark === fence[0].repeat(mark.length);
}

function block(lines) {
  const source = lines.join("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) {
    const closed = lines.length > 1 && closes(lines.at(-1), fence[2]);
    const code = lines.slice(1, closed ? -1 : undefined).map((line) => withoutIndent(line, fence[1].length));
    return { kind: "code", source: code.join("\n"), language: fence[3].trim().split(/\s/)[0] };
  }
  const heading = HEADING.exec(lines[0]);
  if (heading) return { kind: "heading", source: heading[2], level: heading[1].length };
  return { kind: ITEM.test(lines[0]) ? "list" : "paragraph", source };
}

function withoutIndent(line, width) {
  let at = 0;
  while (at < width && line[at] === " ") at += 1;
  return line.slice(at);
}

/** Return the element of a block; `depth` counts the lists around it. */
export function element(found, depth = 0) {
  if (found.kind === "code") return codeBlock(found);
  if (found.kind === "heading") return make(`h${Math.min(found.level + 3, 6)}`, {}, ...inline(found.source));
  if (found.kind === "list" && depth < DEEPEST) return list(found.source.split("\n"), depth);
  return make("p", {}, ...inline(found.source));
}

function codeBlock({ source, language }) {
  const code = make("code", { textContent: source });
  const label = language ? `Code, ${language}` : "Code";
  return make("div.code", {},
    make("div.code-head", {}, make("span", { textContent: language || "code" }),
      copyButton(() => code.textContent, { className: "plain", "aria-label": "Copy this code" })),
    // Wide code scrolls by itself; the keyboard must reach it for that.
    make("pre", { tabIndex: 0, "role": "region", "aria-label": label }, code));
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const base = first[1].length;
  const ordered = /\d/.test(first[2]);
  const own = make(ordered ? "ol" : "ul");
  if (ordered) own.start = Number.parseInt(first[2], 10);
  let content = [];
  let width = 0;
  const flush = () => {
    if (content.length) own.append(make("li", {}, ...blocks(content.join("\n")).map((x) => element(x, depth + 1))));
  };
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length < base + 2) {
      flush();
      content = [item[3] ?? ""];
      width = item[1].length + item[2].length + 1;
    } else {
      content.push(withoutIndent(line, width));
    }
  }
  flush();
  return own;
}

/** Return the nodes of a line or paragraph: text, code, strong and em. */
export function inline(text) {
  const frames = [{ mark: null, nodes: [] }];
  const put = (node) => frames.at(-1).nodes.push(node);
  for (const token of tokens(text)) {
    if (token.code !== undefined) {
      put(make("code", { textContent: token.code }));
    } else if (token.mark === undefined) {
      put(document.createTextNode(token.text));
    } else {
      const open = frames.findIndex((frame) => frame.mark === token.mark);
      if (open > 0 && token.closes) {
        while (frames.length > open + 1) spill(frames);
        const { nodes } = frames.pop();
        put(make(token.mark === "**" ? "strong" : "em", {}, ...nodes));
      } else if (open < 0 && token.opens) {
        frames.push({ mark: token.mark, nodes: [] });
      } else {
        put(document.createTextNode(token.mark));
      }
    }
  }
  while (frames.length > 1) spill(frames);
  return frames[0].nodes;
}

/** A mark that nothing closed is text. */
function spill(frames) {
  const { mark, nodes } = frames.pop();
  frames.at(-1).nodes.push(document.createTextNode(mark), ...nodes);
}

/** Yield {text}, {code} and {mark, opens, closes}; a mark is one or two stars. */
function* tokens(text) {
  const unclosed = new Set(); // lengths of backtick runs that have no partner ahead: each is searched for only once
  const space = (character) => character === undefined || /\s/.test(character);
  let from = 0;
  let at = 0;
  while (at < text.length) {
    const character = text[at];
    if (character !== "`" && character !== "*") {
      at += 1;
      continue;
    }
    let end = at;
    while (text[end] === character) end += 1;
    const run = end - at;
    const close = character === "`" && !unclosed.has(run) ? closingRun(text, end, run) : -1;
    if (character === "`" && close < 0) unclosed.add(run);
    if (close >= 0 || (character === "*" && run <= 2)) {
      if (from < at) yield { text: text.slice(from, at) };
      if (close >= 0) {
        yield { code: text.slice(end, close) };
        end = close + run;
      } else {
        yield { mark: text.slice(at, end), opens: !space(text[end]), closes: !space(text[at - 1]) };
      }
      from = end;
    }
    at = end;
  }
  if (from < text.length) yield { text: text.slice(from) };
}

function closingRun(text, from, length) {
  let at = text.indexOf("`", from);
  while (at >= 0) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === length) return at;
    at = text.indexOf("`", end);
  }
  return -1;
}

/** Shows a text that grows: blocks that did not change keep their elements, and so their focus and selection. */
export class Growing {
  /** @param {Element} parent gets the blocks; it has no other children */
  constructor(parent) {
    this.parent = parent;
    this.keys = [];
  }

  /** Show this text. */
  show(text) {
    const found = blocks(text);
    const keys = found.map((x) => `${x.kind} ${x.level ?? x.language ?? ""}\n${x.source}`);
    let same = 0;
    while (same < keys.length && keys[same] === this.keys[same]) same += 1;
    if (same === keys.length - 1 && this.continues(found[same], keys[same])) {
      this.parent.lastChild.querySelector("code").textContent = found[same].source;
      same += 1;
    }
    while (this.parent.children.length > same) this.parent.lastChild.remove();
    this.parent.append(...found.slice(same).map((x) => element(x, 0)));
    this.keys = keys;
  }

  /** Whether this block is the last one shown, a code block, with more lines: it keeps its place and its scroll bar. */
  continues(found, key) {
    const old = this.keys.at(-1);
    return found.kind === "code" && old !== undefined && this.parent.lastChild?.matches(".code") && key.startsWith(old) && old.split("\n", 1)[0] === key.split("\n", 1)[0];
  }
}
