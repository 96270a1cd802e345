// Pictures of the memories: one panel for each rule, and two charts over the steps.

import { Scene } from "./scene.js";
import { inkOn, signed, visible } from "./theme.js";

export const PANEL_WIDTH = 320;
const LEFT = 76; // of the matrix; the key, or the weights of a cache, stand before it
const KEY_WIDTH = 34;

/** Return a number with two decimals at most, short enough for a cell. */
export function figure(number) {
  if (number === null || number === undefined) return "–";
  const text = Math.abs(number) >= 100 ? String(Math.round(number)) : number.toFixed(Math.abs(number) >= 9.995 ? 1 : 2);
  return text.replace(/^(-?)0\./, "$1.").replace(/^-\.00$/, "0").replace(/^\.00$/, "0").replace(/^(-?\d+)\.00$/, "$1");
}

/** Return a step in words; of a long vector only the first numbers, unless all are asked for. */
export function named(step, all = false) {
  if (step.op === "forget") return `forget ${step.key}`;
  if (typeof step.value === "string") return `${step.key} = ${step.value}`;
  const numbers = step.value.map(figure);
  return `${step.key} = (${(all || numbers.length < 4 ? numbers : [...numbers.slice(0, 2), "…"]).join(", ")})`;
}

/** Return a step in three letters. */
const brief = (step) => (step.op === "forget" ? `${step.key}✕` : `${step.key}=${typeof step.value === "string" ? step.value : "…"}`);

function about(rule) {
  if (rule.cache) return "keeps every pair, has no gates";
  if (rule.note) return rule.note;
  const does = rule.corrects ? "corrects by its error" : "adds each write";
  return `${does}; ${{ none: "never forgets", head: "one decay for all", channel: "a decay for each channel" }[rule.decay]}`;
}

function cell(scene, x, y, width, height, number, most, colours, title, size = 12) {
  const fill = signed(number, most, colours);
  scene.rect(x, y, width - 1, height - 1, fill, { stroke: colours.line, thickness: 0.75, title: `${title}: ${number.toFixed(3)}` });
  if (width < 27 || height < 16) return;
  const fits = (text) => text.length * size * 0.6 <= width;
  const text = fits(figure(number)) ? figure(number) : number.toFixed(Math.abs(number) < 9.95 ? 1 : 0);
  scene.text(x + (width - 1) / 2, y + height / 2 + size * 0.36, text, inkOn(fill), { size, anchor: "middle" });
}

/** Return the largest size of a number in all states that are shown, at least 1. */
export function scaleOf(result, at) {
  let most = 1;
  for (const own of Object.values(result.rules)) {
    for (const number of [own.states?.[at] ?? [], own.answers[at]].flat(2)) most = Math.max(most, Math.abs(number));
  }
  return most;
}

/** Return the rows of the picture: those of S with the asked key, or the pairs of a cache with their weights. */
function rowsOf(rule, own, view) {
  const { result, at, ask, steps } = view;
  if (!rule.cache) {
    const key = result.keys.vectors[ask];
    return own.states[at].map((numbers, i) => ({ name: `${i + 1}`, weight: key[i], numbers }));
  }
  return steps.slice(0, at).map((step, i) => ({ step, i })).filter(({ step }) => step.op === "write").map(({ step, i }) => (
    { name: step.key, weight: own.rows[at][i], numbers: result.values.written[i] }));
}

/** Return the panel of one rule after `view.at` steps. */
export function panel(rule, view, colours) {
  const { result, at, ask, steps, most } = view;
  const own = result.rules[rule.name];
  const names = result.values.names;
  const width = Math.min(44, (PANEL_WIDTH - LEFT - 8) / names.length);
  const area = Math.max(4, result.keys.names.length) * 26;
  const rows = rowsOf(rule, own, view);
  const height = area / Math.max(rows.length, result.keys.names.length);
  const scene = new Scene(PANEL_WIDTH, 88 + area + 70 + 60);
  const key = result.keys.names[ask];

  scene.rect(0, 4, 4, 34, visible(rule.color, colours), { radius: 2 });
  scene.text(12, 18, rule.label, colours.text, { size: 15, weight: 600 });
  scene.text(12, 36, about(rule), colours.faint, { size: 12 });
  const error = own.errors[at][ask];
  const size = rule.cache ? `cache of ${rows.length} pairs` : `norm of S ${figure(own.norms[at])}`;
  scene.text(12, 60, error === null ? `${key} was never written` : `error of ${key} ${figure(error)}`, colours.text,
    { size: 13, weight: 600 });
  scene.text(PANEL_WIDTH - 8, 60, size, colours.text, { size: 13, anchor: "end" });

  scene.text(LEFT - 14 - KEY_WIDTH / 2, 81, rule.cache ? "weight" : `key ${key}`, colours.faint, { size: 11, anchor: "middle" });
  names.forEach((name, j) => scene.text(LEFT + (j + 0.5) * width, 81, name, colours.faint, { size: 12, anchor: "middle" }));
  rows.forEach((row, i) => {
    const y = 88 + i * height;
    if (height >= 12) scene.text(10, y + height / 2 + 4, row.name, colours.faint, { size: 11 });
    const what = rule.cache ? `weight of pair ${i + 1}` : `key ${key}, channel ${i + 1}`;
    cell(scene, LEFT - 14 - KEY_WIDTH, y, KEY_WIDTH, height, row.weight, 1, colours, what, 11);
    row.numbers.forEach((number, j) => {
      cell(scene, LEFT + j * width, y, width, height, number, most, colours, `row ${row.name}, ${names[j]}`);
    });
  });
  if (!rows.length) scene.text(LEFT, 88 + area / 2, "empty", colours.faint, { size: 13 });

  const answer = 88 + area + 8;
  [["answer", own.answers[at][ask]], ["wanted", result.targets[at][ask]]].forEach(([label, numbers], i) => {
    const y = answer + i * 27;
    scene.text(LEFT - 10, y + 17, label, colours.text, { size: 12, anchor: "end", weight: i ? 400 : 600 });
    if (numbers) numbers.forEach((number, j) => cell(scene, LEFT + j * width, y, width, 26, number, most, colours, `${label}, ${names[j]}`));
    else scene.text(LEFT, y + 17, "nothing", colours.faint, { size: 12 });
  });
  reads(scene, own.rows[at], steps, key, answer + 62, colours);
  return scene;
}

/** Add the row of weights with which the asked key reads the value of each step. */
function reads(scene, weights, steps, key, top, colours) {
  scene.text(10, top + 11, `what ${key} reads of each step`, colours.faint, { size: 11 });
  if (!weights.length) return;
  const width = Math.min(38, (PANEL_WIDTH - 18) / weights.length);
  const most = Math.max(1, ...weights.map(Math.abs));
  weights.forEach((weight, i) => {
    const x = 10 + i * width;
    cell(scene, x, top + 17, width, 22, weight, most, colours, `step ${i + 1}, ${named(steps[i], true)}`, 11);
    if (width >= 26) scene.text(x + width / 2, top + 52, brief(steps[i]), colours.faint, { size: 11, anchor: "middle" });
  });
}

const CHART = { height: 210, left: 44, right: 12, top: 34, bottom: 34 };
export const CHART_WIDTH = 480; // in a file

/** Return a chart of one number of each rule over the steps; lines end with the letter of their rule. */
export function chart(title, rules, series, at, width, colours, { unit = "steps", height = CHART.height } = {}) {
  const { left, right, top, bottom } = CHART;
  const scene = new Scene(width, height);
  const shown = rules.filter((rule) => series(rule));
  const count = shown.length ? series(shown[0]).length - 1 : 0;
  const most = Math.max(1, ...shown.flatMap((rule) => series(rule).map((x) => x ?? 0)));
  const x = (i) => left + (width - left - right - 20) * (count ? i / count : 0);
  const y = (number) => height - bottom - (height - top - bottom) * (number / most);
  scene.text(8, 18, title, colours.text, { size: 13, weight: 600 });
  for (const share of [0, 0.5, 1]) {
    scene.line([[left, y(share * most)], [width - right, y(share * most)]], colours.line);
    scene.text(left - 6, y(share * most) + 4, figure(share * most), colours.faint, { size: 11, anchor: "end" });
  }
  const every = Math.max(1, Math.ceil(count / 8));
  for (let i = 0; i <= count; i += every) scene.text(x(i), height - bottom + 16, i, colours.faint, { size: 11, anchor: "middle" });
  scene.text(width - right, height - 4, unit, colours.faint, { size: 11, anchor: "end" });
  scene.line([[x(at), top - 6], [x(at), height - bottom]], colours.faint, { dash: 3 });
  const ends = [];
  shown.forEach((rule, order) => {
    const numbers = series(rule);
    const colour = visible(rule.color, colours);
    const points = numbers.map((number, i) => (number === null ? null : [x(i), y(number)])).filter(Boolean);
    scene.line(points, colour, { thickness: 2 + 0.8 * (shown.length - 1 - order) }); // lines that coincide are seen side by side
    points.forEach(([px, py]) => scene.dot(px, py, count > 30 ? 1.5 : 3, colour));
    if (points.length) ends.push({ letter: rule.letter, colour, at: points.at(-1)[1] });
  });
  ends.sort((a, b) => a.at - b.at);
  ends.forEach((end, i) => { if (i) end.at = Math.max(end.at, ends[i - 1].at + 13); });
  for (let i = ends.length - 1, lowest = height - bottom; i >= 0; i -= 1) {
    ends[i].at = Math.min(ends[i].at, lowest);
    lowest = ends[i].at - 13;
  }
  for (const end of ends) {
    scene.dot(width - right - 14, end.at, 4, end.colour);
    scene.text(width - right - 7, end.at + 4, end.letter, colours.text, { size: 11 });
  }
  return scene;
}

/** Return all panels and charts in one picture, for a file. */
export function whole(panels, charts, title, colours) {
  const columns = Math.min(3, panels.length) || 1;
  const deep = panels[0]?.height ?? 0;
  const rows = Math.ceil(panels.length / columns);
  const width = Math.max(columns * (PANEL_WIDTH + 20) + 20, charts.length * (CHART_WIDTH + 20) + 20);
  const scene = new Scene(width, 60 + rows * (deep + 20) + CHART.height + 20);
  scene.rect(0, 0, scene.width, scene.height, colours.back);
  scene.text(20, 34, title, colours.text, { size: 18, weight: 600 });
  panels.forEach((one, i) => scene.place(one, 20 + (i % columns) * (PANEL_WIDTH + 20), 56 + Math.floor(i / columns) * (deep + 20)));
  charts.forEach((one, i) => scene.place(one, 20 + i * (CHART_WIDTH + 20), 56 + rows * (deep + 20)));
  return scene;
}
