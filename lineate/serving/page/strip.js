// The strip below an answer: how much of the prompt the cache had, how fast it went, and what each layer remembers.

import { bytes, count, make } from "./dom.js";

const KINDS = { memory: "memory of a fixed size", cache: "cache, grows with the tokens" };

/** Return what the server said about an answer, or null if it said nothing. */
export function figures(node) {
  const usage = node.usage;
  if (!usage) return null;
  const own = usage.lineate ?? {};
  const prompt = usage.prompt_tokens ?? 0;
  const cached = Math.min(own.cached_tokens ?? usage.prompt_tokens_details?.cached_tokens ?? 0, prompt);
  const seconds = node.timing ? node.timing.end - node.timing.first : 0;
  const written = usage.completion_tokens ?? 0;
  return {
    prompt, cached, written,
    read: own.read_tokens ?? prompt - cached,
    speed: own.tokens_per_second ?? (seconds > 0 && written > 1 ? (written - 1) / seconds : null),
    layers: (Array.isArray(own.layers) ? own.layers : [])
      .map((x) => ({ letter: String(x.letter), label: String(x.label || x.letter), kind: String(x.kind), bytes: Number(x.bytes) || 0 })),
  };
}

/**
 * Return the strip of an answer, or null if the server said nothing about it.
 * @param {object} node the answer
 * @param {object|null} before the answer before it in this conversation, whose layers it grew from
 * @param {number} most bytes of the largest layer in this conversation: the bars of all its answers share one scale
 */
export function strip(node, before, most) {
  const now = figures(node);
  if (!now) return null;
  const own = make("div.strip", { role: "group", "aria-label": "How this answer was made" });
  own.append(...prompt(now), speeds(node, now));
  if (now.layers.length) own.append(layers(now.layers, before ? figures(before)?.layers ?? [] : [], most));
  return own;
}

function prompt({ prompt: total, cached, read }) {
  const share = total ? (100 * cached) / total : 0;
  const filled = make("span.cached");
  filled.style.width = `${share}%`;
  return [
    make("div.bar", { role: "img", "aria-label": `${Math.round(share)} percent of the prompt came from the cache` }, filled),
    parts("prompt", part(`${count(cached)} prompt ${cached === 1 ? "token" : "tokens"} cached`, "cached"), part(`${count(read)} read`, "read")),
  ];
}

function speeds(node, { written, speed }) {
  const words = [];
  if (node.timing) words.push(`first token after ${duration(node.timing.first)}`);
  words.push(`${count(written)} ${written === 1 ? "token" : "tokens"} written`);
  if (speed !== null) words.push(`${speed >= 100 ? count(Math.round(speed)) : speed.toPrecision(3)} tokens/s`);
  return parts("speeds", ...words.map((x) => part(x)));
}

/** Return a line of parts, none of which is broken over two lines. */
const parts = (name, ...spans) => make(`p.parts.${name}`, {}, ...spans.flatMap((span) => [span, " "]));

/** Return words with a patch of the colour that they explain. */
const part = (words, colour = null) =>
  make("span", {}, colour ? make(`i.patch.${colour}`, { "aria-hidden": "true" }) : null, words);

const duration = (value) => (value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(2)} s`);

function layers(now, before, most) {
  const words = now.map((layer, index) => sentence(layer, index, before[index]));
  const summary = totals(now, before);
  const readout = parts("readout", ...summary);
  const bars = now.map((layer, index) => bar(layer, before[index], most, words[index]));
  bars[0].tabIndex = 0;
  const show = (index) => readout.replaceChildren(...(index < 0 ? summary.flatMap((x) => [x, " "]) : [words[index]]));
  const crowd = now.length > 56 ? ".crowded" : now.length > 16 ? ".many" : ""; // letters need room
  const row = make(`div.layers${crowd}`, {
    role: "group",
    "aria-label": "Memory of each layer; arrow keys go from one to the next",
    onpointerover: (event) => show(bars.indexOf(event.target.closest("button"))),
    onpointerleave: () => show(bars.indexOf(document.activeElement)),
    onfocusin: (event) => {
      for (const other of bars) other.tabIndex = -1;
      event.target.tabIndex = 0;
      show(bars.indexOf(event.target));
    },
    onfocusout: () => show(-1),
    onclick: (event) => event.target.closest("button")?.focus(), // Safari does not focus what is clicked
    onkeydown: (event) => {
      const at = bars.indexOf(event.target);
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: bars.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      bars[Math.max(0, Math.min(to, bars.length - 1))].focus();
    },
  }, ...bars);
  return make("div.memory", {}, row, readout);
}

function bar(layer, before, most, words) {
  const old = before ? Math.min(before.bytes, layer.bytes) : layer.bytes;
  const height = (value) => `${most > 0 ? Math.max(value > 0 ? 4 : 0, (100 * value) / most) : 0}%`;
  const all = make("span.all");
  const kept = make("span.kept");
  all.style.height = height(layer.bytes);
  kept.style.height = layer.bytes > 0 ? `${(100 * old) / layer.bytes}%` : "0%";
  all.append(kept);
  const kind = layer.kind === "cache" ? "cache" : "fixed";
  return make(`button.layer.${kind}`, { type: "button", tabIndex: -1, "aria-label": words },
    make("span.column", {}, all), make("span.letter", { textContent: layer.letter, "aria-hidden": "true" }));
}

function sentence(layer, index, before) {
  const grown = before ? layer.bytes - before.bytes : 0;
  const change = !before ? "" : grown > 0 ? `, ${bytes(grown)} more than after the last answer` : ", as after the last answer";
  return `Layer ${index + 1} (${layer.label}): ${bytes(layer.bytes)}, ${KINDS[layer.kind] ?? layer.kind}${change}`;
}

function totals(now, before) {
  const sum = (those) => those.reduce((total, layer) => total + layer.bytes, 0);
  const fixed = now.filter((layer) => layer.kind !== "cache");
  const caches = now.filter((layer) => layer.kind === "cache");
  const grown = sum(now) - sum(before);
  const found = [];
  if (fixed.length) found.push(part(`${count(fixed.length)} fixed ${fixed.length === 1 ? "memory" : "memories"}: ${bytes(sum(fixed))}`, "fixed"));
  if (caches.length) found.push(part(`${count(caches.length)} ${caches.length === 1 ? "cache" : "caches"}: ${bytes(sum(caches))}`, "cache-old"));
  if (caches.length && before.length && grown > 0) found.push(part(`${bytes(grown)} since the last answer`, "cache-new"));
  return found;
}

/** Return the bytes of the largest layer after any of these turns. */
export function largestLayer(turns) {
  return Math.max(0, ...turns.flatMap((turn) => figures(turn)?.layers.map((layer) => layer.bytes) ?? []));
}
