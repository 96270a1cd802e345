// The view "Plan": sliders over lineate.planning.

import { Asker, choice, numberFrom, partsOf, slider, stateOf } from "./controls.js";
import { byId, make } from "./dom.js";
import { bars, curve, tokens, whole } from "./plan_draw.js";
import { svgOf } from "./scene.js";
import { chartWidth, theme } from "./theme.js";

const WAIT = 80; // milliseconds between a change and its question, as a new model takes the server a while
const HEADS = [64, 128, 256];
const NUMBERS = ["context", "batch", "hidden", "layers", "head", "group", "devices"];
const SIZES = ["hidden", "layers", "head", "group"];

export class PlanView {
  constructor(about, { linked, notice, say }) {
    this.name = "plan";
    Object.assign(this, { about, linked, notice, say, result: null, timer: 0 });
    this.usual = {
      preset: "", pattern: "GGGA", dtype: "bfloat16", hardware: "h100", devices: 1, context: 131072, batch: 8,
      hidden: 2048, layers: 24, head: 128, group: 4,
    };
    this.state = this.usual;
    this.asker = new Asker("api/plan", (value) => this.answered(value), notice);
    this.build();
  }

  build() {
    const { limits, presets, dtypes, hardware, mixers } = this.about;
    const powers = (id, label, most, name, show = tokens) => slider(
      { id, label, min: 0, max: Math.log2(most), step: 1, show: (value) => show(2 ** value) }, (value) => this.change({ [name]: 2 ** value }));
    this.pattern = make("input", { id: "pattern", type: "text", maxLength: limits.pattern, spellcheck: false, autocomplete: "off",
      "aria-describedby": "pattern-hint", oninput: () => this.typed() });
    this.controls = {
      preset: choice("preset", "Model", [["", "by its sizes"], ...presets.map((name) => [name, name])], (preset) => this.choosePreset(preset)),
      hidden: slider({ id: "hidden", label: "Hidden size", min: 256, max: limits.hidden_size, step: 256, show: String }, (hidden) => this.change({ hidden })),
      layers: slider({ id: "layers", label: "Layers", min: 1, max: limits.layers, step: 1, show: String }, (layers) => this.change({ layers })),
      head: choice("head", "Head channels", HEADS.map((n) => [n, n]), (head) => this.change({ head: Number(head) })),
      group: choice("group", "Key heads", [1, 2, 4, 8].map((n) => [n, n === 1 ? "as many as queries" : `1 for ${n} query heads`]), (group) => this.change({ group: Number(group) })),
      dtype: choice("dtype", "Dtype", dtypes.map((name) => [name, name]), (dtype) => this.change({ dtype })),
      context: slider({ id: "context", label: "Context", min: 10, max: Math.log2(limits.context), step: 1, show: (value) => tokens(2 ** value) }, (value) => this.change({ context: 2 ** value })),
      batch: powers("batch", "Batch", limits.batch, "batch", (n) => n.toLocaleString()),
      hardware: choice("hardware", "Hardware", hardware.map((one) => [one.name, one.label]), (name) => this.change({ hardware: name })),
      devices: powers("devices", "Devices", limits.devices, "devices", String),
    };
    const { preset, hidden, layers, head, group, dtype, context, batch, hardware: machine, devices } = this.controls;
    const letters = mixers.map((one) => `${one.letter} ${one.label}`).join(", ");
    byId("plan-model").append(preset.element, make("div.field", {}, make("label", { htmlFor: "pattern", textContent: "Pattern" }), this.pattern),
      make("p.hint", { id: "pattern-hint", textContent: `Letters are repeated over the layers: ${letters}.` }),
      hidden.element, layers.element, head.element, group.element, dtype.element);
    byId("plan-run").append(context.element, batch.element, machine.element, devices.element);
  }

  open(text) {
    this.state = stateOf(this, () => this.fromText(text));
    this.refresh();
  }

  fromText(text) {
    const parts = partsOf(text);
    const state = { ...this.usual, ...(parts.preset && { pattern: "", dtype: "" }) };
    const { limits, presets, dtypes, hardware, mixers } = this.about;
    const most = { context: limits.context, batch: limits.batch, hidden: limits.hidden_size, layers: limits.layers, head: 256, group: 8, devices: limits.devices };
    for (const [key, value] of Object.entries(parts)) {
      if (NUMBERS.includes(key)) state[key] = numberFrom(value, 1, most[key], true);
      else if (key in this.usual) state[key] = value;
      else throw new Error(`no setting ${key}`);
    }
    const known = { preset: ["", ...presets], dtype: ["", ...dtypes], hardware: hardware.map((one) => one.name) };
    for (const [key, words] of Object.entries(known)) if (!words.includes(state[key])) throw new Error(`no ${key} ${state[key]}`);
    if ([...state.pattern].some((letter) => !mixers.some((one) => one.letter === letter))) throw new Error(`no pattern ${state.pattern}`);
    return state;
  }

  get text() {
    const { state } = this;
    const left = state.preset ? SIZES : [];
    return Object.entries(state).filter(([key, value]) => !left.includes(key) && value !== "").map(([key, value]) => `${key}=${value}`).join("&");
  }

  change(part) {
    this.state = { ...this.state, ...part };
    this.refresh();
  }

  /** A preset comes with its own pattern and dtype, until others are chosen. */
  choosePreset(preset) {
    this.change(preset ? { preset, pattern: "", dtype: "" } : { preset, pattern: "GGGA", dtype: "bfloat16" });
  }

  typed() {
    const known = this.about.mixers.map((one) => one.letter);
    const pattern = this.pattern.value.trim().toUpperCase();
    const wrong = [...pattern].find((letter) => !known.includes(letter));
    const empty = !pattern && !this.state.preset;
    this.pattern.setCustomValidity(wrong || empty ? "not a pattern" : "");
    if (wrong) this.notice(`The pattern has ${wrong}, which is no mixer; letters are ${known.join(" ")}.`);
    else if (!empty) this.change({ pattern });
  }

  refresh() {
    const { state, controls } = this;
    controls.preset.input.value = state.preset;
    if (document.activeElement !== this.pattern) this.pattern.value = state.pattern;
    this.pattern.placeholder = state.preset ? "the model's own" : "";
    for (const name of ["hidden", "layers"]) controls[name].put(state[name]);
    for (const name of ["context", "batch", "devices"]) controls[name].put(Math.log2(state[name]));
    for (const name of ["head", "group", "hardware"]) controls[name].input.value = state[name];
    controls.dtype.input.value = state.dtype || "bfloat16";
    for (const name of SIZES) controls[name].element.hidden = Boolean(state.preset);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.asker.ask(this.body()), WAIT);
    this.linked();
  }

  body() {
    const { preset, pattern, dtype, hardware, devices, context, batch, hidden, layers, head, group } = this.state;
    const shared = { hardware, devices, context, batch, ...(pattern && { pattern }), ...(dtype && { dtype }) };
    if (preset) return { preset, ...shared };
    const heads = Math.floor(hidden / head);
    return { ...shared, hidden_size: hidden, layers, head_dim: head, kv_heads: heads % group ? heads : heads / group };
  }

  answered(value) {
    this.result = value;
    this.notice("");
    if (!this.state.dtype) this.controls.dtype.input.value = value.dtype;
    this.draw();
  }

  draw() {
    const { result } = this;
    if (!result) return;
    const [colours, width] = [theme(), chartWidth(byId("plan-charts"))];
    const { own, pure } = result.models;
    const same = own.letters === pure.letters;
    const ratio = pure.total.bytes / own.total.bytes;
    const fit = own.fits ? `fits into ${result.hardware.name}` : `does not fit into ${result.hardware.name}`;
    byId("verdict").textContent = `${result.name}: ${result.parameters} parameters in ${result.dtype}; ${own.total.text} at ${tokens(result.context)} tokens `
      + `and batch ${result.batch}, which ${fit}.${same ? "" : ` Pure attention takes ${ratio.toFixed(ratio < 10 ? 2 : 0)} times as much.`}`;
    byId("plan-charts").replaceChildren(...[bars, curve].map((draw) => draw(result, width, colours)).map((scene) => make("figure", {}, svgOf(scene, scene.shapes[0].text))));
    this.showNumbers();
  }

  showNumbers() {
    const { result } = this;
    const models = Object.values(result.models);
    const cell = (name, show) => make("tr", {}, make("th", { scope: "row", textContent: name }), ...models.map((one) => make("td", { textContent: show(one) })));
    const time = (what) => (one) => {
      const found = one.times.find((x) => x.what === what);
      return `${found.text} (${found.limit})`;
    };
    byId("numbers").caption.textContent = `On ${result.hardware.name}`;
    byId("numbers").tHead.replaceChildren(make("tr", {}, make("td"), make("th", { scope: "col", textContent: "This model" }), make("th", { scope: "col", textContent: "Pure attention" })));
    byId("numbers").tBodies[0].replaceChildren(
      cell("Weights", (one) => one.parts.weights.text),
      cell("State of a fixed size", (one) => one.parts.state.text),
      cell("Cache", (one) => one.parts.cache.text),
      cell("Together", (one) => one.total.text),
      cell("Fits", (one) => (one.fits ? "yes" : one.weights_fit ? "only the weights" : "no")),
      cell(`Longest context, batch ${result.batch}`, (one) => (one.longest_context === null ? "any" : `${one.longest_context.toLocaleString()} tokens`)),
      cell(`Largest batch, ${tokens(result.context)} tokens`, (one) => one.largest_batch.toLocaleString()),
      cell("Tokens/s of that batch, at most", (one) => one.rates.map((x) => `${x.text}${x.what}`).join("; ") || "no sequence fits"),
      ...models[0].times.map((x) => cell(`${x.what[0].toUpperCase()}${x.what.slice(1)}, batch ${result.batch}, at least`, time(x.what))),
      ...models[0].fitted.map((x, i) => cell(`${x.what[0].toUpperCase()}${x.what.slice(1)}, batch ${result.batch}, by lineate, fitted`, (one) => one.fitted[i].text)),
    );
  }

  picture() { return this.result && whole(this.result, theme()); }
}
