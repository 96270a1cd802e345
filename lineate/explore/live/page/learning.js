// The view "Learning": the loss of memories that learn, with the optimiser exchangeable. The server runs each memory.

import { Asker, choice, numberFrom, partsOf, slider, stateOf } from "./controls.js";
import { byId, make } from "./dom.js";
import { chart, figure } from "./memory_draw.js";
import { together } from "./model_draw.js";
import { svgOf } from "./scene.js";
import { chartWidth, theme, visible } from "./theme.js";

const MEAN = 8; // tokens of the mean that a line shows
const HIGHEST = 2; // a line goes no higher
const FILE_WIDTH = 560;
const SHARED = ["task", "tokens", "channels", "seed", "momentum", "decay", "chunk"];
const RATES = [0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4];

/** Return the means of the last tokens, the first one standing at index 1; null behind where a memory ran away. */
function means(numbers) {
  return [null, ...numbers.map((number, i) => {
    if (number === null) return null;
    const last = numbers.slice(Math.max(0, i - MEAN + 1), i + 1);
    return last.reduce((sum, x) => sum + x, 0) / last.length;
  })];
}

export class LearningView {
  constructor(about, { linked, notice, say }) {
    this.name = "learning";
    const { learning } = about;
    Object.assign(this, { learning, linked, notice, say, results: {}, askers: {} });
    const memories = Object.fromEntries(learning.memories.map((one) => [one.name, this.ownOf(one)]));
    this.usual = { task: "pairs", tokens: 96, channels: 8, seed: 0, momentum: 0.6, decay: 1, chunk: 4, at: 96, memories };
    this.state = this.usual;
    for (const { name } of learning.memories) {
      this.askers[name] = new Asker("api/learning", (value, body) => this.answered(name, value, body), (text) => { this.failed = true; notice(text); });
    }
    this.build();
  }

  ownOf(memory) {
    const [optimiser, rate] = Object.entries(memory.rates)[0];
    return { on: true, optimiser, rate };
  }

  build() {
    const { limits, tasks, memories } = this.learning;
    const number = (name) => (value) => this.change({ [name]: value });
    const from = (id, text, values, name) => slider({ id, label: text, min: 0, max: values.length - 1, step: 1, show: (i) => String(values[i]) }, (i) => this.change({ [name]: values[i] }));
    const [fewest, most] = limits.tokens;
    this.controls = {
      task: choice("task", "Task", tasks.map((one) => [one.name, one.label]), number("task")),
      tokens: slider({ id: "learning-tokens", label: "Tokens", min: fewest, max: most, step: 16, show: String }, (tokens) => this.change({ tokens, at: tokens })),
      channels: from("channels", "Channels", limits.channels, "channels"),
      seed: slider({ id: "seed", label: "Seed", min: 0, max: limits.seed, step: 1, show: String }, number("seed")),
      at: slider({ id: "learning-at", label: "After token", min: 1, max: most, step: 1, show: String }, (at) => this.look(at)),
      momentum: slider({ id: "momentum", label: "Momentum", min: 0, max: limits.momentum, step: 0.01, show: figure }, number("momentum")),
      decay: slider({ id: "learning-decay", label: "Keep", min: 0.5, max: 1, step: 0.01, show: figure }, number("decay")),
      chunk: from("chunk", "Chunk", limits.chunk, "chunk"),
    };
    const { task, tokens, channels, seed, at, momentum, decay, chunk } = this.controls;
    byId("reads").append(task.element, tokens.element, channels.element, seed.element, at.element);
    byId("how").append(momentum.element, decay.element, chunk.element, make("p.hint", {
      textContent: "Momentum is for the optimisers momentum and muon. What is kept of the weights at each token is for sgd, momentum, adam and least squares." }));
    this.rows = Object.fromEntries(memories.map((one) => [one.name, this.row(one)]));
    byId("learners").append(...Object.values(this.rows).map((one) => one.element));
    byId("own-optimisers").onclick = () => this.change({ memories: this.usual.memories });
  }

  /** Return the controls of one memory: whether it is shown, its optimiser, and the rate. */
  row(memory) {
    const { name, short, letter } = memory;
    const patch = make("span.patch", { "data-memory": name });
    const on = make("input", { type: "checkbox", onchange: () => this.changeMemory(name, { on: on.checked }) });
    const optimisers = Object.keys(memory.rates).map((one, i) => [one, i ? one : `${one} (own)`]);
    const optimiser = choice(`optimiser-${name}`, "Optimiser", optimisers, (value) => this.changeMemory(name, { optimiser: value, rate: memory.rates[value] }));
    const rate = slider({ id: `rate-${name}`, label: "Rate", min: 0, max: RATES.length - 1, step: 1, show: (i) => String(RATES[i]) }, (i) => this.changeMemory(name, { rate: RATES[i] }));
    const own = make("fieldset.learner", {}, make("legend", {}, make("label.check", {}, on, patch, `${short} (${letter})`)),
      make("p.hint", { textContent: `${memory.model}, ${memory.loss}` }), optimiser.element, rate.element);
    return { element: own, on, optimiser, rate };
  }

  get text() {
    const { at, memories } = this.state;
    const parts = { ...Object.fromEntries(SHARED.map((name) => [name, this.state[name]])), at };
    parts.memories = Object.entries(memories).filter(([, one]) => one.on).map(([name, one]) => `${name}:${one.optimiser}:${one.rate}`).join(";");
    return Object.entries(parts).map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
  }

  open(text) {
    this.state = stateOf(this, () => this.fromText(text));
    this.refresh();
  }

  fromText(text) {
    const parts = partsOf(text);
    const { limits, tasks, memories } = this.learning;
    const among = (value, known, what) => {
      if (!known.includes(value)) throw new Error(`no ${what} ${value}`);
      return value;
    };
    const read = {
      task: (word) => among(word, tasks.map((one) => one.name), "task"),
      tokens: (word) => numberFrom(word, ...limits.tokens, true),
      channels: (word) => among(Number(word), limits.channels, "number of channels"),
      seed: (word) => numberFrom(word, 0, limits.seed, true),
      momentum: (word) => numberFrom(word, 0, limits.momentum),
      decay: (word) => numberFrom(word, 0.5, 1),
      chunk: (word) => among(Number(word), limits.chunk, "chunk"),
      at: (word) => numberFrom(word, 1, limits.tokens[1], true),
      memories: (word) => {
        const found = Object.fromEntries(memories.map((one) => [one.name, { ...this.ownOf(one), on: false }]));
        for (const one of word.split(";").filter(Boolean)) {
          const [name, optimiser, rate] = one.split(":");
          const known = memories.find((other) => other.name === name);
          if (!known || !(optimiser in known.rates)) throw new Error(`no memory ${one}`);
          found[name] = { on: true, optimiser, rate: among(Number(rate), RATES, "rate") };
        }
        return found;
      },
    };
    const state = { ...this.usual };
    for (const [key, word] of Object.entries(parts)) {
      if (!(key in read)) throw new Error(`no setting ${key}`);
      state[key] = read[key](word);
    }
    state.at = Math.min("at" in parts ? state.at : state.tokens, state.tokens);
    return state;
  }

  change(part) {
    this.state = { ...this.state, ...part };
    this.refresh();
  }

  look(at) {
    this.state = { ...this.state, at };
    this.showControls();
    this.draw();
    this.linked();
  }

  changeMemory(name, part) {
    this.change({ memories: { ...this.state.memories, [name]: { ...this.state.memories[name], ...part } } });
  }

  body(name) {
    const { optimiser, rate } = this.state.memories[name];
    return { memory: name, optimiser, rate, ...Object.fromEntries(SHARED.map((key) => [key, this.state[key]])) };
  }

  refresh() {
    this.failed = false;
    this.showControls();
    for (const { name } of this.shown) {
      const body = this.body(name);
      if (this.results[name]?.key !== JSON.stringify(body)) this.askers[name].ask(body);
    }
    this.linked();
    this.draw();
  }

  get shown() { return this.learning.memories.filter(({ name }) => this.state.memories[name].on); }

  /** The memories whose answers are there. */
  get ready() { return this.shown.filter(({ name }) => this.results[name]?.key === JSON.stringify(this.body(name))); }

  answered(name, value, body) {
    this.results[name] = { value, key: JSON.stringify(body) };
    if (this.ready.length < this.shown.length) return;
    if (!this.failed) this.notice("");
    this.draw();
  }

  showControls() {
    const { state, controls, rows } = this;
    const { limits } = this.learning;
    controls.task.input.value = state.task;
    for (const name of ["tokens", "seed", "momentum", "decay"]) controls[name].put(state[name]);
    controls.channels.put(limits.channels.indexOf(state.channels));
    controls.chunk.put(limits.chunk.indexOf(state.chunk));
    controls.at.input.max = state.tokens;
    controls.at.put(state.at);
    for (const [name, own] of Object.entries(state.memories)) {
      const row = rows[name];
      row.on.checked = own.on;
      row.optimiser.input.value = own.optimiser;
      row.rate.put(RATES.indexOf(own.rate));
      row.optimiser.element.hidden = row.rate.element.hidden = !own.on;
      row.rate.input.disabled = own.optimiser === "muon"; // its steps have a length of their own
    }
  }

  scenes(width) {
    const colours = theme();
    const { at } = this.state;
    const series = (part) => (memory) => {
      const numbers = this.results[memory.name].value[part];
      return numbers && means(numbers).map((x) => (x === null ? null : Math.min(x, HIGHEST)));
    };
    const titles = { errors: "Loss before each token is written", angles: "1 - cosine of answer and value" };
    return {
      colours,
      charts: Object.entries(titles).map(([part, title]) => chart(title, this.ready, series(part), at, width, colours, { unit: "tokens", height: 300 })),
    };
  }

  draw() {
    const { ready, state } = this;
    if (ready.length < this.shown.length) return;
    const { charts, colours } = this.scenes(chartWidth(byId("learning-charts")));
    for (const one of this.learning.memories) byId("learners").querySelector(`[data-memory=${one.name}]`).style.background = visible(one.color, colours);
    byId("learning-charts").replaceChildren(...charts.map((scene) => make("figure", {}, svgOf(scene, scene.shapes[0].text))));
    byId("losses").caption.textContent = `Means of the last ${Math.min(MEAN, state.at)} tokens to token ${state.at}`;
    const now = (numbers) => figure(numbers && means(numbers)[state.at]);
    byId("losses").tBodies[0].replaceChildren(...ready.map(({ name, label }) => {
      const { value } = this.results[name];
      const away = value.ran_away_at !== null && value.ran_away_at <= state.at ? `ran away at token ${value.ran_away_at}` : null;
      const cells = [value.optimiser, value.optimiser === "muon" ? "–" : String(value.rate), away ?? now(value.errors), away ? "–" : now(value.angles)];
      return make("tr", {}, make("th", { scope: "row", textContent: label }), ...cells.map((textContent) => make("td", { textContent })));
    }));
    const angles = ready.map((one) => [means(this.results[one.name].value.angles)[state.at], one.label]).filter(([x]) => x !== null);
    const least = Math.min(...angles.map(([x]) => x));
    const best = angles.filter(([x]) => x < least + 0.005).map(([, label]) => label);
    const task = this.learning.tasks.find((one) => one.name === state.task).label;
    byId("learning-summary").textContent = best.length ? `After ${state.at} of ${state.tokens} tokens (${task}), the answers that point nearest to the values are those of ${best.join(", ")}.` : "Choose a memory.";
  }

  picture() {
    if (!this.ready.length || this.ready.length < this.shown.length) return null;
    const { charts, colours } = this.scenes(FILE_WIDTH);
    return together(byId("learning-summary").textContent, charts, colours);
  }
}
