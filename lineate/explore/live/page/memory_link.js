// A memory's setting and list of steps as text for a link, and back.
//
// keys=4&values=4&cosine=0.3&sharpness=8&ask=A&at=2&rules=LDG&steps=A:x:0.9:1;B:0.5~1~0~0:0.9:1:1~1~0.5~1;A:!:0
// A write is key:value:decay:beta, a forgotten key key:!:decay; the channels' own decays may follow, then e and the rate
// of erasing, and w and the rate of writing, where they are not beta.

import { numberFrom, partsOf } from "./controls.js";

const LETTERS = "ABCDEFGH";

export const keyNames = (count) => [...LETTERS.slice(0, count)];

export const valueNames = (count) => [..."abcdefghijklmnopqrstuvwxyz".slice(-count)];

function stepText(step) {
  const value = step.op === "forget" ? "!" : Array.isArray(step.value) ? step.value.join("~") : step.value;
  const parts = [step.key, value, step.decay];
  if (step.op === "write") parts.push(step.beta);
  if (step.channels) parts.push(step.channels.join("~"));
  for (const name of ["erase", "write"]) if (step[name] !== null && step[name] !== undefined) parts.push(`${name[0]}${step[name]}`);
  return parts.join(":");
}

/** Return the text of a state. */
export function toText(state, rules) {
  const letters = rules.filter((rule) => state.rules.includes(rule.name)).map((rule) => rule.letter).join("");
  const { keys, values, cosine, sharpness, ask, at } = state;
  const parts = { keys, values, cosine, sharpness, ask, at, rules: letters, steps: state.steps.map(stepText).join(";") };
  return Object.entries(parts).map(([key, value]) => `${key}=${value}`).join("&");
}

function stepFrom(text, state, limits) {
  const [key, value, decay, ...rest] = text.split(":");
  if (!keyNames(state.keys).includes(key)) throw new Error(`no key ${key}`);
  const numbers = (words, count, least, most) => {
    const found = words.split("~").map((word) => numberFrom(word, least, most));
    if (found.length !== count) throw new Error(`${words} must have ${count} numbers`);
    return found;
  };
  const step = { op: value === "!" ? "forget" : "write", key, decay: numberFrom(decay ?? "", 0, 1), channels: null };
  if (step.op === "write") {
    step.value = valueNames(state.values).includes(value) ? value : numbers(value, state.values, -limits.number, limits.number);
    step.beta = numberFrom(rest.shift() ?? "", 0, 2);
    Object.assign(step, { erase: null, write: null });
    for (const name of ["write", "erase"]) if (rest.at(-1)?.startsWith(name[0])) step[name] = numberFrom(rest.pop().slice(1), 0, 2);
  }
  if (rest.length) step.channels = numbers(rest.shift(), state.keys, 0, 1);
  if (rest.length) throw new Error(`${text} is too long`);
  return step;
}

/** Return the state of a text; parts that are missing are as in `usual`. An error says what is wrong. */
export function fromText(text, usual, rules, limits) {
  const parts = partsOf(text);
  const [fewest, most] = limits.channels;
  const state = { ...usual };
  if ("keys" in parts) state.keys = numberFrom(parts.keys, fewest, most, true);
  if ("values" in parts) state.values = numberFrom(parts.values, fewest, most, true);
  if ("cosine" in parts) state.cosine = numberFrom(parts.cosine, 0, limits.cosine);
  if ("sharpness" in parts) state.sharpness = numberFrom(parts.sharpness, 0, limits.sharpness);
  if ("rules" in parts) {
    for (const letter of parts.rules) if (!rules.some((rule) => rule.letter === letter)) throw new Error(`no rule ${letter}`);
    state.rules = rules.filter((rule) => parts.rules.includes(rule.letter)).map((rule) => rule.name);
  }
  if ("steps" in parts) {
    state.steps = parts.steps.split(";").filter(Boolean).map((step) => stepFrom(step, state, limits));
    if (state.steps.length > limits.steps) throw new Error(`more than ${limits.steps} steps`);
  }
  state.ask = parts.ask ?? state.ask;
  if (!keyNames(state.keys).includes(state.ask)) throw new Error(`no key ${state.ask}`);
  state.at = "at" in parts ? numberFrom(parts.at, 0, state.steps.length, true) : state.steps.length;
  return state;
}
