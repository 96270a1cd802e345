// Sliders and fields that the views share.

import { make } from "./dom.js";
import { answerTo } from "./server.js";

/**
 * Return a slider with its label and the number next to it.
 * @param {object} options id, label, min, max, step, show: the text for a number
 * @param {Function} changed called with the number while it is dragged, and with true as well when it is let go
 */
export function slider({ id, label, min, max, step, show }, changed) {
  const output = make("output", { htmlFor: id });
  const input = make("input", {
    id, type: "range", min, max, step,
    oninput: () => { put(input.valueAsNumber); changed(input.valueAsNumber, false); },
    onchange: () => changed(input.valueAsNumber, true),
  });
  const put = (value) => {
    input.value = value;
    output.textContent = show(value);
    input.setAttribute("aria-valuetext", output.textContent);
  };
  return { element: make("div.slider", {}, make("label", { htmlFor: id, textContent: label }), input, output), input, put };
}

/** Return a list of choices with its label; choices are [value, text]. */
export function choice(id, label, choices, changed) {
  const input = make("select", { id, onchange: () => changed(input.value) });
  input.append(...choices.map(([value, textContent]) => make("option", { value, textContent })));
  return { element: make("div.field", {}, make("label", { htmlFor: id, textContent: label }), input), input };
}

/** Sends the newest question of a view; while one is being answered, only the last of the following ones waits. */
export class Asker {
  constructor(path, answered, failed) {
    Object.assign(this, { path, answered, failed, busy: false, waiting: null });
  }

  async ask(body) {
    if (this.busy) {
      this.waiting = body;
      return;
    }
    this.busy = true;
    try {
      this.answered(await answerTo(this.path, body), body);
    } catch (error) {
      this.failed(error.message);
    }
    this.busy = false;
    if (this.waiting) {
      const next = this.waiting;
      this.waiting = null;
      this.ask(next);
    }
  }
}

/** Return the state that a view's link describes; if it cannot be read, the usual one, after a notice. */
export function stateOf(view, read) {
  try {
    return read();
  } catch (error) {
    view.notice(`The link could not be read: ${error.message}. The view starts anew.`, true);
    return view.usual;
  }
}

/** Return the parts of a link, key=value with & between; text that is no such list is an error. */
export function partsOf(text) {
  const parts = {};
  for (const pair of text.split("&").filter(Boolean)) {
    const at = pair.indexOf("=");
    if (at < 1) throw new Error("not a list of settings");
    parts[pair.slice(0, at)] = decodeURIComponent(pair.slice(at + 1));
  }
  return parts;
}

/** Return a number from a link; an error if it is none, or out of range. */
export function numberFrom(text, least, most, whole = false) {
  const number = text.trim() === "" ? NaN : Number(text);
  if (!(number >= least && number <= most) || (whole && !Number.isInteger(number))) throw new Error(`${text} is out of range`);
  return number;
}
