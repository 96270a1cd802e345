// A subset of Markdown as elements: paragraphs, headings, lists, code blocks, inline code, bold and italic text.
//
// A model wrote the text, so it is not trusted: elements are built one by one, whatever is not in the subset stays
// text, and nothing here becomes a link, an image or markup.

import { make } from "./dom.js";

export const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
export const HEADING = /^(#{1,6})[ \t]+(.*)$/;
export const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*))?$/;
export const DEEPEST = 6; // lists inside lists; deeper ones are shown as text

/** Whether a line ends the paragraph before it. */
export const begins = (line) => FENCE.test(line) || HEADING.test(line) || ITEM.test(line);

/** Whether a line ends the code that this fence began. */
export function closes(line, fence) {
  const mark = line.trim();
  return mark[0] === fence[0] && mark.length >= fence.length && mark === fence[0].repeat(mark.length);
}

/** Return a line without so many spaces at its beginning, or as many as it has. */
export function withoutIndent(line, width) {
  let at = 0;
  while (at < width && line[at] === " ") at += 1;
  return line.slice(at);
}

/**
 * Return the nodes of a line or paragraph: text, code, strong and em.
 * @returns {{nodes: Node[], certain: number, count: number}} `count` nodes show `certain` characters, and stay the same
 *     whatever follows the text; what follows those can be read by itself
 */
export function inline(text) {
  const frames = [{ mark: null, nodes: [] }];
  const put = (node) => frames.at(-1).nodes.push(node);
  let certain = 0;
  let count = 0;
  for (const token of tokens(text)) {
    if (token.code !== undefined) {
      put(make("code", { textContent: token.code }));
    } else if (token.mark === undefined) {
      const free = frames.length === 1 && token.free;
      const words = free && token.at + token.text.length === text.length ? lastSpace(token.text) : 0;
      if (words > 0) put(document.createTextNode(token.text.slice(0, words)));
      if (free) [certain, count] = [token.at + words, frames[0].nodes.length];
      put(document.createTextNode(token.text.slice(words)));
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
  return { nodes: frames[0].nodes, certain, count };
}

/** Return where the last space of a text is that has words before it, or 0. */
function lastSpace(text) {
  let at = text.length - 1;
  while (at > 0 && !/\s/.test(text[at])) at -= 1;
  return Math.max(at, 0);
}

/** A mark that nothing closed is text. */
function spill(frames) {
  const { mark, nodes } = frames.pop();
  frames.at(-1).nodes.push(document.createTextNode(mark), ...nodes);
}

/**
 * Yield {text, at, free}, {code} and {mark, opens, closes}; a mark is one or two stars. A text is free if no backtick up
 * to its end could become the beginning of code.
 */
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
      if (from < at) yield { text: text.slice(from, at), at: from, free: unclosed.size === 0 };
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
  if (from < text.length) yield { text: text.slice(from), at: from, free: unclosed.size === 0 };
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
