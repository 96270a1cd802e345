// Pictures of a plan: what the memory is made of, and how it grows with the context.

import { Scene } from "./scene.js";

const WIDTH = 560; // in a file
const BAR = { height: 216, left: 16, right: 16 };
const CURVE = { height: 330, left: 64, right: 20, top: 76, bottom: 44 };
const PARTS = { weights: "weights", state: "state, of a fixed size", cache: "cache, which grows with the context" };
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Return a count of tokens as people write it: 4k, 1M. */
export function tokens(count) {
  if (count >= 2 ** 20 && count % 2 ** 20 === 0) return `${count / 2 ** 20}M`;
  return count >= 1024 && count % 1024 === 0 ? `${count / 1024}k` : count.toLocaleString();
}

function power(bytes) {
  const unit = Math.max(0, Math.min(UNITS.length - 1, Math.floor(Math.log2(bytes) / 10)));
  return `${Number((bytes / 1024 ** unit).toPrecision(3))} ${UNITS[unit]}`;
}

/** Return the name of a model with as much of its pattern as a picture of this width has room for. */
function title(name, { pattern }, width) {
  const most = width < 420 ? 5 : 16;
  const shown = pattern.length > most ? `${pattern.slice(0, most - 1)}…` : pattern;
  return `${name === "own" ? "this model" : "pure attention"}, ${shown}`;
}

/** Return the bars: weights, state and cache of both models against the machine's memory. */
export function bars(plan, width, colours) {
  const scene = new Scene(width, BAR.height);
  const room = plan.hardware.memory.bytes;
  const most = Math.max(room, ...Object.values(plan.models).map((one) => one.total.bytes));
  const wide = width - BAR.left - BAR.right;
  const x = (bytes) => (wide * bytes) / most;
  scene.text(8, 18, `Memory at ${tokens(plan.context)} tokens, batch ${plan.batch}`, colours.text, { size: 14, weight: 600 });
  Object.keys(PARTS).reduce((at, part) => {
    scene.rect(at, 32, 11, 11, colours[part === "state" ? "fixed" : part], { radius: 2 });
    scene.text(at + 16, 42, part, colours.faint, { size: 12 });
    return at + 36 + part.length * 6.6;
  }, BAR.left);
  Object.entries(plan.models).forEach(([name, one], i) => {
    const y = 64 + i * 70;
    scene.text(BAR.left, y + 12, title(name, one, width), colours.text, { size: 13 });
    scene.text(width - BAR.right, y + 12, `${one.total.text}${one.fits ? "" : ", does not fit"}`, one.fits ? colours.text : colours.danger,
      { size: 13, anchor: "end", weight: 600 });
    let at = BAR.left;
    for (const part of Object.keys(PARTS)) {
      const long = x(one.parts[part].bytes);
      if (long > 0) scene.rect(at, y + 20, long, 26, colours[part === "state" ? "fixed" : part], { title: `${PARTS[part]}: ${one.parts[part].text}` });
      at += long;
    }
  });
  const at = BAR.left + x(room);
  for (const y of [82, 152]) scene.line([[at, y], [at, y + 32]], colours.danger, { thickness: 2, dash: 5 });
  const end = at > width / 2;
  scene.text(end ? at + 1 : at - 1, 204, `${plan.hardware.name}: ${plan.hardware.memory.text}`, colours.text, { size: 12, anchor: end ? "end" : "start" });
  return scene;
}

/** Return the chart of memory against context, with both axes logarithmic. */
export function curve(plan, width, colours) {
  const { height, left, right, top, bottom } = CURVE;
  const scene = new Scene(width, height);
  const lengths = plan.curve_tokens.map(Math.log2);
  const room = plan.hardware.memory.bytes;
  const all = [room, ...Object.values(plan.models).flatMap((one) => one.curve_bytes)].map(Math.log2);
  const [low, high] = [Math.floor(Math.min(...all)), Math.ceil(Math.max(...all))];
  const [first, last] = [lengths[0], lengths.at(-1)];
  const x = (count) => left + ((width - left - right) * (Math.log2(count) - first)) / (last - first);
  const y = (bytes) => height - bottom - ((height - top - bottom) * (Math.log2(bytes) - low)) / (high - low);
  scene.text(8, 18, `Memory against context, batch ${plan.batch}`, colours.text, { size: 14, weight: 600 });
  const every = Math.max(1, Math.ceil((high - low) / 6));
  for (let i = low; i <= high; i += every) {
    scene.line([[left, y(2 ** i)], [width - right, y(2 ** i)]], colours.line);
    scene.text(left - 6, y(2 ** i) + 4, power(2 ** i), colours.faint, { size: 11, anchor: "end" });
  }
  const apart = width > 400 ? 2 : 4;
  for (let i = first; i <= last; i += apart) scene.text(x(2 ** i), height - bottom + 17, tokens(2 ** i), colours.faint, { size: 11, anchor: "middle" });
  scene.text(width - right, height - 6, "tokens of a sequence", colours.faint, { size: 11, anchor: "end" });
  scene.line([[left, y(room)], [width - right, y(room)]], colours.danger, { thickness: 2, dash: 5 });
  const looks = { pure: { colour: colours.cache, dash: 7 }, own: { colour: colours.fixed, dash: 0 } };
  ["own", "pure"].forEach((name, i) => {
    const { colour, dash } = looks[name];
    const one = plan.models[name];
    scene.line(plan.curve_tokens.map((count, i) => [x(count), y(one.curve_bytes[i])]), colour, { thickness: 2.5, dash });
    scene.line([[12, 36 + 18 * i], [40, 36 + 18 * i]], colour, { thickness: 2.5, dash });
    scene.text(46, 40 + 18 * i, title(name, one, width), colours.text, { size: 12 });
  });
  const far = (i) => Math.min(...Object.values(plan.models).map((one) => Math.abs(y(one.curve_bytes[i]) - y(room))));
  const atStart = Math.min(far(0), far(3)) >= Math.min(far(lengths.length - 1), far(lengths.length - 4)); // where no line is near
  scene.text(atStart ? left + 4 : width - right, y(room) - 6, `memory of ${plan.hardware.name}`, colours.text,
    { size: 11, anchor: atStart ? "start" : "end" });
  if (plan.context >= 2 ** first) {
    scene.line([[x(plan.context), top - 6], [x(plan.context), height - bottom]], colours.faint, { dash: 3 });
    for (const name of ["own", "pure"]) scene.dot(x(plan.context), y(plan.models[name].total.bytes), 4.5, looks[name].colour);
  }
  return scene;
}

/** Return both pictures in one, for a file. */
export function whole(plan, colours) {
  const width = WIDTH;
  const parts = [bars(plan, width, colours), curve(plan, width, colours)];
  const scene = new Scene(width + 40, 50 + parts.reduce((sum, part) => sum + part.height + 14, 0));
  scene.rect(0, 0, scene.width, scene.height, colours.back);
  scene.text(20, 30, `${plan.name}, ${plan.dtype}, ${plan.parameters} parameters`, colours.text, { size: 16, weight: 600 });
  parts.reduce((y, part) => {
    scene.place(part, 20, y);
    return y + part.height + 14;
  }, 46);
  return scene;
}
