// The view "Memory": the state, its history, its controls. The server computes; memory_draw.js draws.

import { Asker, slider, stateOf } from "./controls.js";
import { button, byId, make } from "./dom.js";
import { CHART_WIDTH, chart, figure, named, panel, scaleOf, whole } from "./memory_draw.js";
import { fromText, keyNames, toText, valueNames } from "./memory_link.js";
import { svgOf } from "./scene.js";
import { chartWidth, theme, visible } from "./theme.js";

const MOST_UNDONE = 200;
const round = (number) => Math.round(number * 1000) / 1000;

export class MemoryView {
  constructor(about, { linked, notice, say }) {
    this.name = "memory";
    Object.assign(this, { about, linked, notice, say, result: null, undone: [], done: [], dragging: null });
    this.rules = about.memory_rules;
    this.gates = { decay: 0.9, beta: 1, channels: null, erase: null, write: null };
    const write = (key, value) => ({ op: "write", key, value, ...this.gates });
    this.usual = {
      keys: 4, values: 4, cosine: 0, sharpness: 8, ask: "A", at: 3, rules: about.rules.map((rule) => rule.name),
      steps: [write("A", "w"), write("B", "x"), write("A", "y")],
    };
    this.state = this.usual;
    this.asker = new Asker("api/memory", (value, body) => this.answered(value, body), notice);
    this.build();
  }

  /** Make the controls whose number does not change. */
  build() {
    const { rules } = this;
    const { limits } = this.about;
    byId("at").oninput = (event) => this.look({ at: event.target.valueAsNumber });
    byId("undo").onclick = () => this.travel(this.done, this.undone);
    byId("redo").onclick = () => this.travel(this.undone, this.done);
    byId("clear").onclick = () => this.change({ steps: [], at: 0 });
    byId("all-steps").onclick = () => this.gateAll();
    byId("vector-form").onsubmit = (event) => {
      event.preventDefault();
      const form = event.target;
      this.write(form.elements.key.value, valueNames(this.state.values).map((name) => form.elements[`number-${name}`].valueAsNumber || 0));
    };
    const drag = (name) => (value, ends) => this.resize({ [name]: value }, name, ends);
    const [min, max] = limits.channels;
    this.sliders = {
      cosine: slider({ id: "cosine", label: "Cosine of keys", min: 0, max: limits.cosine, step: 0.05, show: figure }, drag("cosine")),
      sharpness: slider({ id: "sharpness", label: "Softmax scale", min: 0, max: limits.sharpness, step: 1, show: String }, drag("sharpness")),
      keys: slider({ id: "keys", label: "Keys", min, max, step: 1, show: String }, drag("keys")),
      values: slider({ id: "values", label: "Value channels", min, max, step: 1, show: String }, drag("values")),
    };
    byId("setting").append(...Object.values(this.sliders).map((one) => one.element));
    byId("rules").append(...rules.map((rule) => {
      const patch = make("span.patch", { "data-rule": rule.name });
      const input = make("input", { type: "checkbox", value: rule.name, onchange: () => this.chooseRules() });
      return make("label", {}, input, patch, `${rule.short} (${rule.letter})`);
    }));
  }

  /** Show a link's state; "" is the usual one. The history stays if the state is the one that is here already. */
  open(text) {
    if (this.result && text === this.text) {
      this.show();
      return;
    }
    this.state = stateOf(this, () => fromText(text, this.usual, this.rules, this.about.limits));
    this.undone = [];
    this.done = [];
    this.takeGates();
    this.refresh();
  }

  get text() { return toText(this.state, this.rules); }

  /** Change the state; a slider that is dragged (`dragging` is its name) makes one entry of the history. */
  change(part, dragging = null, ends = true) {
    if (dragging === null || dragging !== this.dragging) {
      this.done.push(this.state);
      if (this.done.length > MOST_UNDONE) this.done.shift();
      this.undone = [];
    }
    this.dragging = ends ? null : dragging;
    this.state = { ...this.state, ...part };
    this.refresh();
  }

  /** Change the selection, which is not an entry of the history. */
  look(part) {
    const asks = "ask" in part;
    this.state = { ...this.state, ...part };
    this.takeGates();
    if (asks) this.refresh();
    else this.show();
  }

  travel(from, to) {
    if (!from.length) return;
    to.push(this.state);
    this.state = from.pop();
    this.takeGates();
    this.refresh();
    this.say(`${this.state.steps.length} steps`);
  }

  /** Undo with Ctrl+Z and redo with Ctrl+Shift+Z, unless a number is being typed. */
  pressed(event) {
    if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z" || event.target.type === "number") return;
    event.preventDefault();
    if (event.shiftKey) this.travel(this.undone, this.done);
    else this.travel(this.done, this.undone);
  }

  add(step) {
    const { steps, at } = this.state;
    if (steps.length >= this.about.limits.steps) {
      this.notice(`There may be at most ${this.about.limits.steps} steps; remove one or clear them.`);
      return;
    }
    this.change({ steps: [...steps.slice(0, at), step, ...steps.slice(at)], at: at + 1 });
    this.takeGates();
    this.say(`Step ${at + 1}: ${named(step, true)}`);
  }

  write(key, value) { this.add({ op: "write", key, value, ...this.gates }); }

  forget(key) { this.add({ op: "forget", key, decay: 0, channels: null }); }

  remove(index) {
    const { steps, at } = this.state;
    this.change({ steps: steps.filter((_, i) => i !== index), at: index < at ? at - 1 : at });
  }

  get selected() { return this.state.at ? this.state.steps[this.state.at - 1] : null; }

  /** Copy the gates of the selected write to the next write. */
  takeGates() {
    const { selected } = this;
    if (selected?.op === "write") this.gates = Object.fromEntries(Object.keys(this.gates).map((name) => [name, selected[name] ?? null]));
  }

  /** Return the decay of every channel of a step or of the next write. */
  channelsOf(gates) {
    if (gates.channels) return gates.channels;
    return keyNames(this.state.keys).map((key) => (gates.op === "forget" && key !== gates.key ? 1 : gates.decay));
  }

  gate(part, name, ends) {
    const { selected } = this;
    if (selected?.op !== "forget") this.gates = { ...this.gates, ...part };
    if (!selected) {
      this.showGates();
      return;
    }
    const { steps, at } = this.state;
    this.change({ steps: steps.map((step, i) => (i === at - 1 ? { ...step, ...part } : step)) }, `${name} of ${at}`, ends);
  }

  gateAll() {
    this.change({ steps: this.state.steps.map((step) => (step.op === "write" ? { ...step, ...this.gates } : step)) });
  }

  /** Change a setting; steps whose key or value is no longer there go, vectors get or lose numbers. */
  resize(part, dragging, ends) {
    const next = { ...this.state, ...part };
    const [keys, values] = [keyNames(next.keys), valueNames(next.values)];
    const fit = (numbers, count, rest) => Array.from({ length: count }, (_, i) => numbers[i] ?? rest);
    const fitted = next.steps.map((step) => ({
      ...step,
      ...(Array.isArray(step.value) && { value: fit(step.value, next.values, 0) }),
      ...(step.channels && { channels: fit(step.channels, next.keys, 1) }),
    }));
    const stays = fitted.map((step) => keys.includes(step.key) && (typeof step.value !== "string" || values.includes(step.value)));
    if (this.gates.channels) this.gates = { ...this.gates, channels: fit(this.gates.channels, next.keys, 1) };
    this.change({
      ...part, steps: fitted.filter((_, i) => stays[i]), at: stays.slice(0, next.at).filter(Boolean).length,
      ask: keys.includes(next.ask) ? next.ask : "A",
    }, dragging, ends);
  }

  chooseRules() {
    const rules = [...byId("rules").querySelectorAll("input:checked")].map((input) => input.value);
    this.change({ rules });
  }

  /** Ask the server for the state, and show what does not depend on its answer. */
  refresh() {
    const { keys, values, cosine, sharpness, ask, rules, steps } = this.state;
    const sent = steps.map((step) => Object.fromEntries(Object.entries(step).filter(([, x]) => x !== null))); // null: as beta or decay
    this.asker.ask({ keys, values, cosine, sharpness, ask, rules, steps: sent });
    this.showControls();
    this.linked();
  }

  answered(value, body) {
    this.result = value;
    this.resultSteps = body.steps;
    this.resultAsk = value.keys.names.indexOf(body.ask);
    this.notice("");
    this.draw();
  }

  show() {
    this.showControls();
    this.draw();
    this.linked();
  }

  showControls() {
    const { state } = this;
    this.showGrid();
    this.showVector();
    const last = byId("at");
    last.max = state.steps.length;
    last.value = state.at;
    last.setAttribute("aria-valuetext", `step ${state.at} of ${state.steps.length}`);
    byId("at-value").textContent = `${state.at} of ${state.steps.length}`;
    byId("undo").disabled = !this.done.length;
    byId("redo").disabled = !this.undone.length;
    byId("clear").disabled = !state.steps.length;
    this.showSteps();
    this.showGates();
    for (const [name, one] of Object.entries(this.sliders)) one.put(state[name]);
    for (const input of byId("rules").querySelectorAll("input")) input.checked = state.rules.includes(input.value);
  }

  /** Show the grid; it is made anew only if its size changes, so that the focus stays. */
  showGrid() {
    const { keys, values, ask, steps, at } = this.state;
    const grid = byId("grid");
    if (grid.dataset.size !== `${keys} ${values}`) {
      grid.dataset.size = `${keys} ${values}`;
      const row = (key) => make("div", {},
        make("label", {}, make("input", { type: "radio", name: "ask", value: key, "aria-label": `Ask for ${key}`,
          onchange: () => this.look({ ask: key }) }), key),
        ...valueNames(values).map((value) => button(value, () => this.write(key, value), { "aria-label": `Write ${key} = ${value}` })),
        button("Forget", () => this.forget(key), { className: "forget", "aria-label": `Forget ${key}` }));
      grid.replaceChildren(make("div.keys", { onkeydown: moveInGrid }, ...keyNames(keys).map(row)));
      grid.dataset.ask = "";
    }
    if (grid.dataset.ask !== ask) { // the grid is one stop of the Tab key, first in the row that is asked for
      grid.dataset.ask = ask;
      for (const one of grid.querySelectorAll("button")) one.tabIndex = -1;
      grid.querySelector(`[value=${ask}]`).closest("div").querySelector("button").tabIndex = 0;
    }
    const held = {};
    for (const step of steps.slice(0, at)) held[step.key] = step.op === "write" ? step.value : null;
    for (const one of grid.querySelectorAll("button:not(.forget)")) {
      const [, key, value] = one.getAttribute("aria-label").match(/Write (.) = (.)/);
      one.classList.toggle("held", held[key] === value);
    }
    for (const one of grid.querySelectorAll("input")) one.checked = one.value === ask;
  }

  showVector() {
    const { keys, values } = this.state;
    const form = byId("vector-form");
    if (form.dataset.size === `${keys} ${values}`) return;
    form.dataset.size = `${keys} ${values}`;
    const most = this.about.limits.number;
    form.replaceChildren(
      make("label", {}, "Key", make("select", { name: "key" }, ...keyNames(keys).map((key) => make("option", { value: key, textContent: key })))),
      ...valueNames(values).map((name) => make("label", {}, name,
        make("input", { type: "number", name: `number-${name}`, value: "0.5", min: -most, max: most, step: "any", required: true }))),
      make("button", { type: "submit", textContent: "Write" }));
  }

  showSteps() {
    const { steps, at } = this.state;
    const focused = [...byId("steps").querySelectorAll("button")].indexOf(document.activeElement);
    byId("steps").replaceChildren(...steps.map((step, i) => {
      const go = button(named(step), () => this.look({ at: i + 1 }), { className: `go${i >= at ? " later" : ""}`, title: named(step, true), "aria-label": `Step ${i + 1}: ${named(step, true)}` });
      if (i === at - 1) go.setAttribute("aria-current", "step");
      return make("li", {}, go, button("×", () => this.remove(i), { className: "remove", "aria-label": `Remove step ${i + 1}` }));
    }));
    if (focused >= 0) (byId("steps").querySelectorAll("button")[focused] ?? byId("clear")).focus();
    byId("steps").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  }

  showGates() {
    const { selected, state } = this;
    const forgets = selected?.op === "forget";
    const holder = byId("gates");
    const leans = state.cosine > 0 ? "mostly " : ""; // a key has a part in every channel
    if (holder.dataset.size !== `${state.keys} ${leans}`) {
      holder.dataset.size = `${state.keys} ${leans}`;
      const show = figure;
      this.gateSliders = {
        decay: slider({ id: "decay", label: "Decay", min: 0, max: 1, step: 0.05, show }, (decay, ends) => this.gate({ decay, channels: null }, "decay", ends)),
        beta: slider({ id: "beta", label: "Beta", min: 0, max: 2, step: 0.05, show }, (beta, ends) => this.gate({ beta, erase: null, write: null }, "beta", ends)),
      };
      this.rateSliders = {
        erase: slider({ id: "erase", label: "Erase", min: 0, max: 2, step: 0.05, show }, (erase, ends) => this.gate({ erase }, "erase", ends)),
        write: slider({ id: "write", label: "Write", min: 0, max: 2, step: 0.05, show }, (write, ends) => this.gate({ write }, "write", ends)),
      };
      this.channelSliders = keyNames(state.keys).map((key, i) => slider(
        { id: `channel-${i + 1}`, label: `Channel ${i + 1} (${leans}${key})`, min: 0, max: 1, step: 0.05, show },
        (decay, ends) => {
          const channels = this.channelsOf(this.selected ?? this.gates).map((old, j) => (i === j ? decay : round(old)));
          this.gate({ channels }, `channel ${i}`, ends);
        }));
      const opened = [...holder.querySelectorAll("details")].map((one) => one.open);
      const part = (i, textContent, sliders) => make("details", { open: opened[i] ?? false }, make("summary", { textContent }), ...sliders.map((one) => one.element));
      holder.replaceChildren(...Object.values(this.gateSliders).map((one) => one.element),
        part(0, "Decay of each channel (Kimi Delta Attention, Gated DeltaNet-2, RWKV-7)", this.channelSliders),
        part(1, "Erase and write separately (Gated DeltaNet-2, RWKV-7)", Object.values(this.rateSliders)));
    }
    const gates = selected ?? this.gates;
    byId("gates-title").textContent = selected ? `Gates of step ${state.at} (${named(selected)})` : "Gates of the next write";
    this.gateSliders.decay.put(gates.decay);
    this.gateSliders.beta.put(forgets ? 0 : gates.beta);
    this.gateSliders.beta.input.disabled = forgets;
    for (const [name, one] of Object.entries(this.rateSliders)) {
      one.put(forgets ? 0 : gates[name] ?? gates.beta);
      one.input.disabled = forgets;
    }
    this.channelsOf(gates).forEach((decay, i) => this.channelSliders[i].put(decay));
    byId("all-steps").disabled = forgets || !state.steps.length;
  }

  /** Return the pictures of the rules and the charts, which are of this width. */
  scenes(width) {
    const { result, state } = this;
    const colours = theme();
    const rules = this.rules.filter((rule) => rule.name in result.rules);
    const at = Math.min(state.at, this.resultSteps.length);
    const view = { result, at, ask: this.resultAsk, steps: this.resultSteps, most: scaleOf(result, at) };
    return {
      rules, at, colours,
      panels: rules.map((rule) => panel(rule, view, colours)),
      charts: [
        chart("Mean error of all keys that were written", rules, (rule) => result.rules[rule.name].mean_errors, at, width, colours),
        chart("Norm of S", rules, (rule) => result.rules[rule.name].norms, at, width, colours),
      ],
    };
  }

  draw() {
    if (!this.result) return;
    const { rules, at, panels, charts, colours } = this.scenes(chartWidth(byId("charts")));
    for (const rule of this.rules) byId("rules").querySelector(`[data-rule=${rule.name}]`).style.background = visible(rule.color, colours);
    const { result } = this;
    const key = result.keys.names[this.resultAsk];
    const words = (rule) => {
      const numbers = result.rules[rule.name].answers[at][this.resultAsk];
      const parts = numbers.map((x, i) => [x, result.values.names[i]]).filter(([x]) => Math.abs(x) >= 0.005);
      return parts.length ? parts.map(([x, name]) => `${figure(x)} ${name}`).join(", ") : "nothing";
    };
    const written = this.resultSteps.slice(0, at).some((step) => step.op === "write" && step.key === key);
    byId("answers").caption.textContent = `Asked for ${key} after step ${at}${written ? "" : ": nothing was written under it"}`;
    byId("answers").tBodies[0].replaceChildren(...rules.map((rule) => {
      const own = result.rules[rule.name];
      const cells = [words(rule), figure(own.errors[at][this.resultAsk]), figure(own.norms?.[at])];
      return make("tr", {}, make("th", { scope: "row", textContent: rule.label }), ...cells.map((textContent) => make("td", { textContent })));
    }));
    byId("panels").replaceChildren(...panels.map((scene, i) => make("figure", {},
      svgOf(scene, `${rules[i].label}, asked for ${key}: ${words(rules[i])}, error ${figure(result.rules[rules[i].name].errors[at][this.resultAsk])}`))));
    byId("charts").replaceChildren(...charts.map((scene) => make("figure", {}, svgOf(scene, scene.shapes[0].text))));
  }

  /** Return the whole picture, for a file. */
  picture() {
    if (!this.result) return null;
    const { panels, charts, at, colours } = this.scenes(CHART_WIDTH);
    const done = this.resultSteps.slice(0, at).map((step) => named(step)).slice(-10).join(", ");
    const cosine = this.state.cosine ? `; cosine of keys ${figure(this.state.cosine)}` : "";
    return whole(panels, charts, `After ${at} steps${at > 10 ? ", the last ones" : ""}${at ? `: ${done}` : ""}${cosine}`, colours);
  }
}

/** Move the focus, and the grid's stop of the Tab key, between its buttons with the arrow keys. */
function moveInGrid(event) {
  const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!by || event.target.tagName !== "BUTTON") return;
  const rows = [...event.currentTarget.children].map((row) => [...row.querySelectorAll("button")]);
  const row = rows.findIndex((buttons) => buttons.includes(event.target));
  const next = rows[row + by[0]]?.[rows[row].indexOf(event.target) + by[1]];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
