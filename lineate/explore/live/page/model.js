// The view "Model": a text through a model, token by token, next to the same model with a change. model_draw.js draws.

import { Asker, choice, numberFrom, partsOf, stateOf } from "./controls.js";
import { button, byId, make } from "./dom.js";
import { figure } from "./memory_draw.js";
import { gates, label, lines, matrix, scaleOf, state, together } from "./model_draw.js";
import { svgOf } from "./scene.js";
import { theme } from "./theme.js";

const WAIT = 250; // milliseconds after the last letter that was typed
const FOLDER = "\n"; // the choice of the list that stands for a folder, whose name it cannot be
const GATES = { decay: "Forget nothing (decay gate open)", write: "Write with rate 1 (beta gate open)", output: "Let all output through (output gate open)" };
const FILE_WIDTH = 560;
const nats = (numbers) => numbers.reduce((sum, x) => sum + x, 0) / numbers.length;
const tokensOf = (life) => (life >= 1e9 ? "endless" : `${figure(life)} tokens`);
const percent = (share) => `${(100 * share).toFixed(1)}%`;

/** Name the token with the highest loss; the first token has none. */
function highest(losses, tokens) {
  const most = losses.indexOf(Math.max(...losses));
  return `${losses[most].toFixed(2)} at token ${most + 2} (${label(tokens[most + 1])})`;
}

/** Name the head that forgets slowest; a half-life is the median over the channels and over the tokens of the text. */
function slowest(layers) {
  const all = layers.flatMap((one, layer) => one.half_lives.map((life, head) => ({ layer, head, life })));
  if (!all.length) return "";
  const { layer, head, life } = all.reduce((best, one) => (one.life > best.life ? one : best));
  return `On this text, layer ${layer}, head ${head} forgets slowest: its median half-life is ${tokensOf(life)}.`;
}

export class ModelView {
  constructor(about, { linked, notice, say }) {
    this.name = "model";
    Object.assign(this, { about, linked, notice, say, whole: null, step: null, timer: 0 });
    this.usual = { model: about.models[0].name, text: about.text, layer: 0, head: 0, at: null, changes: {} };
    this.state = this.usual;
    this.wholeAsker = new Asker("api/model", (value, body) => this.answered("whole", value, body), notice);
    this.stepAsker = new Asker("api/model/step", (value, body) => this.answered("step", value, body), notice);
    this.build();
  }

  build() {
    const { about } = this;
    byId("text").maxLength = about.limits.characters;
    byId("text-hint").textContent = `At most ${about.limits.tokens} tokens. Arrow keys move between tokens.`;
    byId("text").oninput = () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.change({ text: byId("text").value, at: null }), WAIT);
    };
    byId("token").oninput = (event) => this.go(event.target.valueAsNumber);
    byId("token-before").onclick = () => this.go(this.at - 1);
    byId("token-after").onclick = () => this.go(this.at + 1);
    byId("tokens").onkeydown = (event) => {
      const to = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 1, End: this.count }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.go(to);
      byId("tokens").querySelector("[aria-current]")?.focus();
    };
    this.layer = choice("layer", "Layer", [], (layer) => this.change({ layer: Number(layer), head: 0 }));
    this.head = choice("attention-head", "Head", [], (head) => this.change({ head: Number(head) }));
    byId("layer-choice").append(this.layer.element, this.head.element, make("p.hint", { id: "slowest" }));
    const rules = about.rules.map((rule) => [rule.name, rule.label]);
    this.rule = choice("rule", "Rule", rules, () => this.changeLayer());
    this.gates = Object.entries(GATES).map(([name, text]) => {
      const input = make("input", { type: "checkbox", value: name, id: `gate-${name}`, onchange: () => this.changeLayer() });
      return { input, element: make("label.check", {}, input, text) };
    });
    byId("change").append(this.rule.element, ...this.gates.map((gate) => gate.element));
    byId("to-change").onclick = () => {
      byId("change-title").scrollIntoView();
      this.rule.input.focus({ preventScroll: true });
    };
    byId("unchange").onclick = () => this.change({ changes: {} });
    const models = about.models.map((one) => [one.name, one.label]);
    if (about.folders) models.push([FOLDER, "a folder …"]);
    this.which = choice("which-model", "Model", models, (model) => this.choose(model));
    byId("which").append(this.which.element);
    byId("folder-form").onsubmit = (event) => {
      event.preventDefault();
      this.change({ ...this.usual, model: byId("folder").value.trim(), text: this.state.text });
      this.say("The folder is being read");
    };
  }

  get count() { return this.whole?.value.tokens.length ?? 0; }

  get at() { return Math.min(this.state.at ?? this.count, this.count); }

  get text() {
    const { model, text, layer, head, at, changes } = this.state;
    const written = Object.entries(changes).map(([n, one]) => [n, one.rule ?? "", one.off.join("+")].join(":")).join(";");
    const parts = { model, text: text.toWellFormed?.() ?? text, layer, head, at: at ?? "", changes: written };
    return Object.entries(parts).filter(([, value]) => value !== "").map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
  }

  open(text) {
    this.state = stateOf(this, () => this.fromText(text));
    byId("text").value = this.state.text;
    this.refresh();
  }

  fromText(text) {
    const parts = partsOf(text);
    for (const key of Object.keys(parts)) if (!(key in this.usual)) throw new Error(`no setting ${key}`);
    const { model, text: own } = { ...this.usual, ...parts };
    const number = (key, least, usual) => (key in parts ? numberFrom(parts[key], least, 4096, true) : usual);
    const changes = {};
    for (const one of (parts.changes ?? "").split(";").filter(Boolean)) {
      const [layer, rule, off] = one.split(":");
      const found = { rule: rule || null, off: (off ?? "").split("+").filter(Boolean) };
      if (found.rule && !this.about.rules.some((known) => known.name === found.rule)) throw new Error(`no rule ${rule}`);
      for (const gate of found.off) if (!(gate in GATES)) throw new Error(`no gate ${gate}`);
      changes[numberFrom(layer, 0, 4096, true)] = found;
    }
    return { model, text: own, layer: number("layer", 0, 0), head: number("head", 0, 0), at: number("at", 1, null), changes };
  }

  change(part) {
    this.state = { ...this.state, ...part };
    this.refresh();
  }

  /** Show another step, which needs a smaller answer. */
  go(at) {
    if (at < 1 || at > this.count) return;
    this.state = { ...this.state, at };
    this.stepAsker.ask(this.body(true));
    this.showSteps();
    this.linked();
  }

  choose(model) {
    byId("folder-form").hidden = model !== FOLDER;
    if (model === FOLDER) byId("folder").focus();
    else this.change({ ...this.usual, model, text: this.state.text });
  }

  /** Take the rule and the gates that are chosen for the layer that is shown. */
  changeLayer() {
    const own = this.whole?.value.model.layers[this.state.layer];
    if (!own) return;
    const rule = this.rule.input.value === own.rule ? null : this.rule.input.value;
    const off = this.gates.filter((gate) => gate.input.checked && !gate.input.disabled).map((gate) => gate.input.value);
    const changes = { ...this.state.changes };
    delete changes[this.state.layer];
    if (rule || off.length) changes[this.state.layer] = { rule, off };
    this.change({ changes });
  }

  body(step) {
    const { model, text, layer, head, at, changes } = this.state;
    const sent = Object.entries(changes).map(([n, one]) => ({ layer: Number(n), ...(one.rule && { rule: one.rule }), ...(one.off.length && { off: one.off }) }));
    return { model, text, layer, head, changes: sent, ...(step && at !== null && { at }) };
  }

  refresh() {
    if (!this.whole) byId("model-summary").textContent = "The model is being opened. The built-in one is trained once, which takes half a minute.";
    this.wholeAsker.ask(this.body(false));
    this.stepAsker.ask(this.body(true));
    this.linked();
  }

  answered(part, value, { at, ...body }) {
    this[part] = { value, key: JSON.stringify(body) };
    if (part === "whole") this.showControls();
    if (this.whole?.key !== this.step?.key) return;
    this.notice("");
    this.draw();
  }

  showControls() {
    const { model, layer, head } = this.whole.value;
    const fill = (one, options) => {
      const text = JSON.stringify(options);
      if (one.input.dataset.options !== text) {
        one.input.dataset.options = text;
        one.input.replaceChildren(...options.map(([value, textContent]) => make("option", { value, textContent })));
      }
    };
    fill(this.layer, model.layers.map((own, i) => [i, `${i}: ${own.label} (${own.letter})`]));
    const { heads, half_lives: lives } = model.layers[layer];
    fill(this.head, Array.from({ length: heads }, (_, i) => [i, lives.length ? `${i}: half-life ${tokensOf(lives[i])}` : String(i)]));
    byId("slowest").textContent = slowest(model.layers);
    this.layer.input.value = layer;
    this.head.input.value = head;
    const own = model.layers[layer];
    const { rule, off } = this.state.changes[layer] ?? { rule: null, off: [] };
    const others = this.about.rules.map((one) => [one.name, one.name === own.rule ? `${one.label} (own)` : one.label]);
    fill(this.rule, this.about.rules.some((one) => one.name === own.rule) ? others : [[own.rule, `${own.label} (own)`], ...others]);
    this.rule.input.value = rule ?? own.rule;
    this.rule.input.disabled = !own.changeable;
    for (const gate of this.gates) {
      gate.input.disabled = !own.gates.includes(gate.input.value);
      gate.input.checked = off.includes(gate.input.value);
    }
    byId("change-title").textContent = `Change layer ${layer}`;
    const made = Object.entries(this.state.changes).map(([n, one]) => `layer ${n}: ${[one.rule && this.labelOf(one.rule), ...one.off.map((gate) => `${gate} gate open`)].filter(Boolean).join(", ")}`);
    byId("changes").textContent = made.length ? `Changed: ${made.join("; ")}.`
      : own.changeable ? "Nothing is changed." : `${own.label} has no rule or gates that can be changed here; choose another layer.`;
    byId("unchange").disabled = !made.length;
    const known = this.about.models.some((one) => one.name === model.name);
    this.which.input.value = known ? model.name : FOLDER;
    byId("folder-form").hidden = known;
    if (!known) byId("folder").value = model.name;
    byId("facts").hidden = !model.facts.length;
    byId("facts").querySelector("dl").replaceChildren(...model.facts.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })]));
    this.showSteps();
  }

  labelOf(rule) { return this.about.rules.find((one) => one.name === rule).label; }

  /** Show the tokens; the list is one stop of the Tab key. */
  showSteps() {
    const { tokens } = this.whole.value;
    const { at, count } = this;
    byId("token").max = count;
    byId("token").value = at;
    byId("token").setAttribute("aria-valuetext", `token ${at} of ${count}: ${tokens[at - 1]}`);
    byId("token-value").textContent = `${at} of ${count}`;
    byId("token-before").disabled = at <= 1;
    byId("token-after").disabled = at >= count;
    const list = byId("tokens");
    if (list.dataset.tokens !== JSON.stringify(tokens)) {
      list.dataset.tokens = JSON.stringify(tokens);
      list.replaceChildren(...tokens.map((token, i) => make("li", {}, button(label(token), () => this.go(i + 1), { "aria-label": `Token ${i + 1}: ${token}` }))));
    }
    [...list.querySelectorAll("button")].forEach((one, i) => {
      one.tabIndex = i + 1 === at ? 0 : -1;
      one.classList.toggle("later", i >= at);
      if (i + 1 !== at) {
        one.removeAttribute("aria-current");
        return;
      }
      one.setAttribute("aria-current", "step");
      list.scrollTop = one.offsetTop - (list.clientHeight - one.offsetHeight) / 2; // the page itself stays where it is
    });
  }

  /** Return the pictures for columns of this width: [heading for screen readers, scene]. */
  scenes(width) {
    const { value: { tokens, own, changed, loss } } = this.whole;
    const { value: step } = this.step;
    const { at } = step;
    const colours = theme();
    const both = (name) => [own, changed].filter(Boolean).map((part) => part[name]).filter(Boolean);
    const named = (what, i) => `${what}${changed ? [" of the model", " with the changes"][i] : ""}`;
    const pictures = [];
    const parts = [own, changed].filter(Boolean);
    if (own) {
      const most = scaleOf(...both("matrix"));
      const states = [step.own, step.changed].filter(Boolean);
      const dark = scaleOf(...states.map((one) => one.cells));
      const reads = (part) => {
        const row = part.matrix[at - 1];
        const to = row.reduce((best, x, j) => (Math.abs(x) > Math.abs(row[best]) ? j : best), 0);
        const token = Math.floor(to / (part.writes ?? 1));
        return `token ${at}, ${tokens[at - 1]}, reads token ${token + 1}, ${tokens[token]}, with the largest weight, ${row[to].toFixed(2)}`;
      };
      parts.forEach((part, i) => pictures.push([`${named("Attention", i)}, ${part.rule}: ${reads(part)}`, matrix(named("Attention", i), part, tokens, at, most, width, colours)]));
      states.forEach((part, i) => {
        const what = part.kind === "cache" ? "Cache" : "State S";
        pictures.push([`${named(what, i)} after token ${at}: ${part.rows} rows, ${part.columns} columns`, state(`${named(what, i)} after token ${at}`, part, tokens, dark, width, colours)]);
      });
      parts.forEach((part, i) => {
        if (part.beta || part.erased || part.decay) pictures.push([`${named("Gates", i)} at each token`, gates(named("Gates", i), part, tokens, at, width, colours)]);
      });
    }
    const curve = (title, all) => pictures.push([title, lines(title, all, tokens, at, width, colours)]);
    if (own?.norms) {
      const looks = { state: ["S itself", colours.text], written: ["written by the token", colours.fixed], corrected: ["taken back of what its key held", colours.danger], forgotten: ["forgotten before it", colours.cache] };
      const all = Object.entries(looks).filter(([name]) => own.norms[name]).map(([name, [text, colour]]) => ({ name: text, numbers: own.norms[name], colour, writes: Math.round(own.norms[name].length / tokens.length) }));
      if (changed?.norms) all.push({ name: "S with the changes", numbers: changed.norms.state, colour: colours.text, dash: 5 });
      curve("Norms of the state and of each write", all);
    }
    const losses = [{ name: changed ? "the model" : "loss", numbers: loss.own, colour: colours.fixed, first: 2 }];
    if (loss.changed) losses.push({ name: "with the changes", numbers: loss.changed, colour: colours.danger, dash: 5, first: 2 });
    if (loss.own.length) curve("Loss of each token", losses);
    return { pictures, colours };
  }

  draw() {
    if (!this.whole || this.whole.key !== this.step?.key) return;
    const room = byId("model-pictures").clientWidth;
    const columns = Math.max(1, Math.floor((room + 16) / 400)); // as in style.css
    const width = (room - 16 * (columns - 1)) / columns - 24;
    const places = [...document.querySelectorAll("#model .scroll")].map((one) => one.scrollLeft);
    const figures = this.scenes(width).pictures.map(([text, scene]) => make("figure", {}, make("div.scroll", {}, svgOf(scene, text))));
    byId("model-pictures").replaceChildren(...figures, byId("next"));
    [...document.querySelectorAll("#model .scroll")].forEach((one, i) => {
      if (one.scrollWidth > one.clientWidth) { // keys can scroll what has the focus
        Object.assign(one, { tabIndex: 0, role: "group", scrollLeft: places[i] ?? 0 });
        one.setAttribute("aria-label", one.querySelector("title").textContent);
      }
    });
    this.showSummary();
    this.showNext();
  }

  showSummary() {
    const { model, layer, head, tokens, kind, own, loss } = this.whole.value;
    const { at } = this.step.value;
    const [before, after] = [loss.own, loss.changed].map((one) => (one?.length ? nats(one) : null));
    const what = `${model.label}${model.trained ? "" : ", untrained"}: layer ${layer}, ${own?.rule ?? model.layers[layer].label}, head ${head}, after token ${at} of ${tokens.length}.`;
    const change = after === null ? "" : `; with the changes ${after.toFixed(3)} (${after < before ? "" : "+"}${(after - before).toFixed(3)})`;
    const missing = kind === "none" ? " This mixer has no matrix to show: its memory is a model that learns (see the view Learning)." : "";
    byId("model-summary").textContent = `${what}${before === null ? "" : ` Mean loss ${before.toFixed(3)}, highest ${highest(loss.own, tokens)}${change}.`}${missing}`;
  }

  showNext() {
    const { tokens } = this.whole.value;
    const { at, next, changed } = this.step.value;
    const two = next[0].changed !== null;
    const table = byId("next");
    table.caption.textContent = `What may follow token ${at} (${tokens[at - 1]})`;
    const names = ["Token", "Probability", ...(two ? ["With the changes", "Difference"] : [])];
    table.tHead.replaceChildren(make("tr", {}, ...names.map((textContent) => make("th", { scope: "col", textContent }))));
    table.tBodies[0].replaceChildren(...next.map((one) => {
      const cells = [percent(one.own), ...(two ? [percent(one.changed), `${one.changed < one.own ? "" : "+"}${percent(one.changed - one.own)}`] : [])];
      return make("tr", {}, make("th", { scope: "row", textContent: `${one.token}${one.follows ? "  (follows in the text)" : ""}` }), ...cells.map((textContent) => make("td", { textContent })));
    }));
  }

  picture() {
    if (!this.whole || this.whole.key !== this.step?.key) return null;
    const { pictures, colours } = this.scenes(FILE_WIDTH);
    return together(byId("model-summary").textContent, pictures.map(([, scene]) => scene), colours);
  }
}
