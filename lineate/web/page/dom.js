// Elements are made by these functions alone. Text always becomes a text node, never markup.

/**
 * Return a new element.
 * @param {string} tag its name, with classes after dots: "p.note.error"
 * @param {object} properties set on the element; names with a dash become attributes; a function under "on..." listens
 * @param {...(Node|string|null)} children put into it; a string becomes text, null is left out
 */
export function make(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key.includes("-")) element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Return the element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/** Return a button that does not send a form. */
export const button = (label, onclick, properties = {}) =>
  make("button", { type: "button", textContent: label, onclick, ...properties });

/** Copy text, also where the page is not served over https and the browser has no clipboard for it. */
export async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const focused = document.activeElement;
  const area = make("textarea.visually-hidden", { value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!done) throw new Error("the browser did not copy");
}

/** Return a button that copies what `text()` returns and says so on itself for a moment. */
export function copyButton(text, properties = {}) {
  const own = button("Copy", async () => {
    try {
      await copy(text());
      own.textContent = "Copied";
    } catch {
      own.textContent = "Not copied";
    }
    setTimeout(() => { own.textContent = "Copy"; }, 1500);
  }, properties);
  return own;
}

/** Whether there is a mouse or a trackpad: where there is none, focusing a field opens a keyboard over the page. */
export const hasPointer = () => window.matchMedia("(pointer: fine)").matches;

/** Return a number with separators, as the reader's language writes it. */
export const count = (number) => number.toLocaleString();

/** Return bytes in a unit that suits them. */
export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit === 0 || number >= 100 ? Math.round(number) : number.toPrecision(3)} ${units[unit]}`;
}
