// A subset of Markdown as elements: paragraphs, headings, lists, code blocks, inline code, bold and italic text.
//
// A model wrote the text, so it is not trusted: elements are built one by one, whatever is not in the subset stays
// text, and nothing here becomes a link, an image or markup.

import { make } from "./dom.js";

export const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
export const HEADING = /^(#{1,6})[ \t]+(.*)$/;
export const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*))?$/;
export const DEEPEST = 6; // lists inside lists; deeper ones are shown as text

// What is farther from a mark than this cannot change it any more, so that an answer that grows is not read again from there.
const REACH = 2000; // characters between a mark and its partner; where there are more, the mark is text
const BACKTICKS = 16; // in a run that begins or ends code; longer ones are text

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
 * Return the nodes of a line or paragraph: text as strings, and the elements code, strong and em.
 * @returns {{nodes: (string|Element)[], certain: number, count: number}} `count` nodes show `certain` characters, and stay
 *     the same whatever follows the text; what follows those can be read by itself
 */
export function inline(text) {
  const frames = [{ mark: null, nodes: [] }];
  const put = (node) => frames.at(-1).nodes.push(node);
  let certain = 0;
  let count = 0;
  for (const token of tokens(text)) {
    const far = token.at + (token.text?.length ?? 0) - REACH;
    while (frames.length > 1 && frames[1].at < far) spill(frames);
    const free = frames.length === 1 && token.free;
    if (free) [certain, count] = [token.at, frames[0].nodes.length];
    if (token.code !== undefined) {
      put(make("code", { textContent: token.code }));
    } else if (token.mark === undefined) {
      const words = free && token.last ? lastBreak(token.text) : 0;
      if (words > 0) {
        put(token.text.slice(0, words));
        certain += words;
        count += 1;
      }
      put(token.text.slice(words));
    } else {
      const open = frames.findIndex((frame) => frame.mark === token.mark);
      if (open > 0 && token.closes) {
        while (frames.length > open + 1) spill(frames);
        const { nodes } = frames.pop();
        put(make(token.mark === "**" ? "strong" : "em", {}, ...joined(nodes)));
      } else if (open < 0 && token.opens) {
        frames.push({ mark: token.mark, nodes: [], at: token.at });
      } else {
        put(token.mark);
      }
    }
  }
  while (frames.length > 1) spill(frames);
  const known = joined(frames[0].nodes.slice(0, count));
  return { nodes: [...known, ...joined(frames[0].nodes.slice(count))], certain, count: known.length };
}

/** Return nodes with one string for the strings that follow each other: a browser takes as long for a text as for an element. */
function joined(nodes) {
  const found = [];
  for (const node of nodes) {
    if (typeof node === "string" && typeof found.at(-1) === "string") found[found.length - 1] += node;
    else found.push(node);
  }
  return found;
}

/** Return where the last space of a text is that has words before it, or another place to part a very long word, or 0. */
function lastBreak(text) {
  let at = text.length - 1;
  while (at > 0 && !/\s/.test(text[at])) at -= 1;
  if (at > 0 || text.length <= REACH) return Math.max(at, 0);
  at = text.length - 1;
  while (at > 0 && (/[`*\uDC00-\uDFFF]/.test(text[at]) || /[`*]/.test(text[at - 1]))) at -= 1; // not inside a character
  return at;
}

/** A mark that nothing closed is text. */
function spill(frames) {
  const { mark, nodes } = frames.pop();
  frames.at(-1).nodes.push(mark, ...nodes);
}

/**
 * Yield {text, at, free, last}, {code, at, free} and {mark, at, free, opens, closes}; a mark is one or two stars. A token
 * is free if no backtick before it could become the beginning of code, and text is the last if none in it could either.
 */
function* tokens(text) {
  const space = (character) => character === undefined || /\s/.test(character);
  let pending = Infinity; // where the first run of backticks is that a partner may still follow
  let from = 0;
  let at = 0;
  const words = (end) => {
    const last = end === text.length && pending === Infinity;
    return { text: text.slice(from, end), at: from, free: from <= pending, last };
  };
  while (at < text.length) {
    const character = text[at];
    if (character !== "`" && character !== "*") {
      at += 1;
      continue;
    }
    let end = at;
    while (text[end] === character) end += 1;
    const run = end - at;
    const code = character === "`" && run <= BACKTICKS;
    const close = code ? closingRun(text, end, run) : -1;
    const waits = code && close < 0 && pending === Infinity && text.length <= end + REACH + BACKTICKS;
    if (close >= 0 || waits || (character === "*" && run <= 2)) {
      if (from < at) yield words(at);
      from = end;
      if (close >= 0) {
        yield { code: text.slice(end, close), at, free: at <= pending };
        from = end = close + run;
      } else if (waits) {
        from = pending = at;
      } else {
        yield { mark: text.slice(at, end), at, free: at <= pending, opens: !space(text[end]), closes: !space(text[at - 1]) };
      }
    }
    at = end;
  }
  if (from < text.length) yield words(text.length);
}

/** Return where the next run of so many backticks begins, at most `REACH` characters ahead, or -1. */
function closingRun(text, from, length) {
  let at = text.indexOf("`", from);
  while (at >= 0 && at <= from + REACH) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === length) return at;
    at = text.indexOf("`", end);
  }
  return -1;
}
