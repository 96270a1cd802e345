// Pictures of a model's layer: what each token reads, the state, the gates, and lines over the tokens.

import { figure } from "./memory_draw.js";
import { Scene } from "./scene.js";
import { signed } from "./theme.js";

const CELL = { least: 11, most: 26 }; // the width of a token's column, in which a letter can be read
const LONGEST = 10; // letters of a token that are shown
const SIZE = 11;
const SHADES = 24; // of each sign

/** Return a token as a label. */
export const label = (token) => ([...token].length > LONGEST ? `${[...token].slice(0, LONGEST - 1).join("")}…` : token);

/** Return the colours of numbers; those that nearly agree have the same one. */
const coloursOf = (rows, most, colours) => rows.map((row) => row.map((x) => signed(Math.round((Math.max(-1, Math.min(1, x / most)) * SHADES)) / SHADES, 1, colours)));

/** Return a size that nearly all numbers are below, so that one large number does not hide the others. */
export function scaleOf(...parts) {
  const sizes = parts.flat(2).map(Math.abs).sort((a, b) => a - b);
  return sizes[Math.floor(0.995 * (sizes.length - 1))] || sizes.at(-1) || 1;
}

/** Return where the columns of tokens are in a picture of about this width, and the height of their labels. */
function columnsOf(tokens, width, left) {
  const cell = Math.max(CELL.least, Math.min(CELL.most, Math.floor((width - left - 10) / tokens.length)));
  const longest = Math.max(...tokens.map((token) => [...label(token)].length));
  return { cell, left, upward: longest > 1, deep: longest > 1 ? 10 + longest * 6.6 : 20, wide: left + tokens.length * cell + 10 };
}

function tokenLabels(scene, tokens, at, y, columns, colours) {
  const { cell, left, upward } = columns;
  tokens.forEach((token, j) => {
    const colour = j + 1 === at ? colours.text : colours.faint;
    const weight = j + 1 === at ? 700 : 400;
    const x = left + (j + 0.5) * cell;
    if (upward) scene.text(x + 4, y + 6, label(token), colour, { size: SIZE, weight, anchor: "end", upward });
    else scene.text(x, y + 14, token, colour, { size: SIZE, weight, anchor: "middle" });
  });
}

function heading(scene, title, note, colours) {
  scene.text(8, 18, title, colours.text, { size: 14, weight: 600 });
  scene.text(8, 36, note, colours.faint, { size: 12 });
}

/** Return the picture of the attention matrix; rows of tokens that were not read yet are empty. */
export function matrix(title, part, tokens, at, most, width, colours) {
  const longest = Math.max(...tokens.map((token) => [...label(token)].length));
  const columns = columnsOf(tokens, width, Math.max(24, 14 + longest * 6.6));
  const { cell, left, deep, wide } = columns;
  const scene = new Scene(Math.max(wide, 300), 48 + tokens.length * cell + deep);
  heading(scene, title, `${part.rule}${part.writes > 1 ? `, ${part.writes} writes a token` : ""}; strongest colour: ${Number(most.toPrecision(2))}`, colours);
  scene.cells(left, 46, cell / (part.writes ?? 1), cell, coloursOf(part.matrix.slice(0, at), most, colours));
  const end = 46 + tokens.length * cell;
  scene.line([[left, 46], [left, end], [left + tokens.length * cell, end]], colours.line);
  scene.rect(left, 46 + (at - 1) * cell, at * cell, cell, "none", { stroke: colours.accent, thickness: 2 });
  tokens.forEach((token, i) => scene.text(left - 5, 46 + (i + 0.5) * cell + 4, label(token), i + 1 === at ? colours.text : colours.faint,
    { size: SIZE, anchor: "end", weight: i + 1 === at ? 700 : 400 }));
  tokenLabels(scene, tokens, at, end, columns, colours);
  return scene;
}

/** Return the picture of a state: S, or the keys and values of a cache with a row for each token. */
export function state(title, part, tokens, most, width, colours) {
  const { kind, rows, columns, cells } = part;
  const cached = kind === "cache";
  const longest = cached ? Math.max(...tokens.map((token) => [...label(token)].length)) : 1;
  const left = cached ? Math.max(24, 14 + longest * 6.6) : 24;
  const cell = Math.max(2, Math.min(16, Math.floor((width - left - 10) / cells[0].length)));
  const high = cached && cells.length === rows ? Math.max(CELL.least, cell) : cell;
  const scene = new Scene(Math.max(300, left + cells[0].length * cell + 10), 54 + cells.length * high + 24);
  const size = cached ? `${rows} tokens, ${columns} channels` : `${rows} keys, ${columns} values`;
  heading(scene, title, `${size}; strongest colour: ${Number(most.toPrecision(2))}`, colours);
  scene.cells(left, 46, cell, high, coloursOf(cells, most, colours));
  scene.rect(left, 46, cells[0].length * cell, cells.length * high, "none", { stroke: colours.line });
  if (cached && cells.length === rows) {
    tokens.slice(0, rows).forEach((token, i) => scene.text(left - 5, 46 + (i + 0.5) * high + 4, label(token), colours.faint, { size: SIZE, anchor: "end" }));
  } else {
    const middle = 46 + (cells.length * high) / 2;
    scene.text(17, middle, cached ? "tokens" : "keys", colours.faint, { size: SIZE, anchor: "middle", upward: true });
  }
  const blocks = cells.length < rows || cells[0].length < columns ? "; a cell is the largest of its block" : "";
  scene.text(left, 46 + cells.length * high + 16, `${cached ? "keys, then values" : "values"}${blocks}`, colours.faint, { size: SIZE });
  return scene;
}

/** Add a bar for each number; a token has `writes` of them. */
function bars(scene, numbers, most, at, y, high, columns, colour, colours, writes = 1) {
  const { left } = columns;
  const cell = columns.cell / writes;
  scene.line([[left, y + high], [left + numbers.length * cell, y + high]], colours.line);
  for (const share of [0, 1]) scene.text(left - 5, y + high - share * high + 4, figure(share * most), colours.faint, { size: SIZE, anchor: "end" });
  numbers.forEach((x, j) => {
    const tall = high * Math.min(1, x / most);
    const token = Math.floor(j / writes) + 1;
    const which = writes > 1 ? `, write ${(j % writes) + 1}` : "";
    scene.rect(left + j * cell + 1, y + high - tall, Math.max(1, cell - 2), tall, token === at ? colours.text : colour, { title: `token ${token}${which}: ${x}` });
  });
}

/** Return the picture of the gates: the rate of each write, and what each token keeps of the memory. */
export function gates(title, part, tokens, at, width, colours) {
  const columns = columnsOf(tokens, width, 40);
  const perHead = part.decay?.per === "head";
  const rows = part.decay && !perHead ? part.decay.rows : [];
  const tall = rows.length ? Math.max(4, Math.floor(160 / rows.length)) : 0;
  const rates = [["write strength (beta)", part.beta], ["share erased along its key", part.erased], ["write strength of the values", part.write]].filter(([, numbers]) => numbers);
  const scene = new Scene(Math.max(300, columns.wide), 30 + 90 * rates.length + (perHead ? 90 : 0) + (rows.length ? 24 + rows.length * tall : 0) + columns.deep);
  scene.text(8, 18, title, colours.text, { size: 14, weight: 600 });
  let y = 26;
  for (const [what, numbers] of rates) {
    scene.text(columns.left, y + 12, what, colours.faint, { size: 12 });
    bars(scene, numbers, Math.max(1, ...numbers), at, y + 20, 60, columns, colours.cache, colours, Math.round(numbers.length / tokens.length));
    y += 90;
  }
  if (part.decay) {
    const [least, middle, most] = part.decay.half_life.map((x) => (x >= 1e9 ? "endless" : figure(x)));
    const lives = least === "endless" ? "nothing is forgotten" : perHead ? `half-life ${middle} tokens` : `half-lives ${least} to ${most} tokens`;
    scene.text(columns.left, y + 12, perHead ? `kept by each token; ${lives}` : `kept of each channel; ${lives}`, colours.faint, { size: 12 });
    if (perHead) {
      bars(scene, part.decay.rows[0], 1, at, y + 20, 60, columns, colours.fixed, colours);
      y += 90;
    } else {
      scene.cells(columns.left, y + 20, columns.cell, tall, coloursOf(rows, 1, colours));
      scene.rect(columns.left + (at - 1) * columns.cell, y + 20, columns.cell, rows.length * tall, "none", { stroke: colours.cache, thickness: 2 });
      scene.text(columns.left - 5, y + 30, "slow", colours.faint, { size: SIZE, anchor: "end" });
      scene.text(columns.left - 5, y + 20 + rows.length * tall, "fast", colours.faint, { size: SIZE, anchor: "end" });
      y += 24 + rows.length * tall;
    }
  }
  tokenLabels(scene, tokens, at, y, columns, colours);
  return scene;
}

/** Return a chart with lines over the tokens; a line is { name, numbers, colour, dash, first, writes }: its first number is that of token `first`, of which it has `writes`. */
export function lines(title, all, tokens, at, width, colours) {
  const columns = columnsOf(tokens, width, 44);
  const [top, high] = [28 + 18 * all.length, 150];
  const scene = new Scene(Math.max(300, columns.wide), top + high + columns.deep);
  const most = Math.max(1e-6, ...all.flatMap((one) => one.numbers));
  const x = (token) => columns.left + (token - 0.5) * columns.cell;
  const y = (number) => top + high - (high - 8) * (number / most);
  scene.text(8, 18, title, colours.text, { size: 14, weight: 600 });
  for (const share of [0, 0.5, 1]) {
    scene.line([[columns.left, y(share * most)], [columns.wide - 10, y(share * most)]], colours.line);
    scene.text(columns.left - 6, y(share * most) + 4, figure(share * most), colours.faint, { size: SIZE, anchor: "end" });
  }
  scene.line([[x(at), top], [x(at), top + high]], colours.faint, { dash: 3 });
  all.forEach(({ name, numbers, colour, dash = 0, first = 1, writes = 1 }, i) => {
    scene.line(numbers.map((number, j) => [x((j + 1) / writes + first - 1), y(number)]), colour, { thickness: 2, dash });
    if (numbers.length === 1) scene.dot(x(first), y(numbers[0]), 3, colour);
    const own = numbers[(at - first + 1) * writes - 1];
    if (own !== undefined) scene.dot(x(at), y(own), 4, colour);
    scene.line([[12, 32 + 18 * i], [36, 32 + 18 * i]], colour, { thickness: 2.5, dash });
    scene.text(42, 36 + 18 * i, `${name}${own === undefined ? "" : `: ${figure(own)}`}`, colours.text, { size: 12 });
  });
  tokenLabels(scene, tokens, at, top + high, columns, colours);
  return scene;
}

/** Return pictures in two columns as one, for a file. */
export function together(title, scenes, colours) {
  const wide = Math.max(...scenes.map((one) => one.width));
  const columns = scenes.length > 1 ? 2 : 1;
  const rows = Array.from({ length: Math.ceil(scenes.length / columns) }, (_, i) => scenes.slice(i * columns, (i + 1) * columns));
  const tall = rows.map((row) => Math.max(...row.map((one) => one.height)) + 20);
  const scene = new Scene(columns * (wide + 20) + 20, 56 + tall.reduce((sum, x) => sum + x, 0));
  scene.rect(0, 0, scene.width, scene.height, colours.back);
  scene.text(20, 34, title, colours.text, { size: 17, weight: 600 });
  let y = 50;
  rows.forEach((row, i) => {
    row.forEach((one, j) => scene.place(one, 20 + j * (wide + 20), y));
    y += tall[i];
  });
  return scene;
}
