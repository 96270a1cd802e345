// The colours of pictures, which are those of the page in its light or dark scheme.

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const SIGNED = {
  light: ["#c75b00", "#f5a742", "#ffffff", "#4a83bf", "#04204f"],
  dark: ["#ffb45c", "#a9611a", "#1b2028", "#2f6aa8", "#a9d5ff"],
};

/** Return the colours of the scheme that the reader has now. */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    back: colour("back"), text: colour("text"), faint: colour("faint"), line: colour("line"), accent: colour("accent"),
    fixed: colour("fixed"), cache: colour("cache"), weights: colour("weights"), danger: colour("danger"),
    signed: SIGNED[dark.matches ? "dark" : "light"],
  };
}

/** Call `draw` whenever the scheme or the size of the window changes. */
export function onChange(draw) {
  dark.addEventListener("change", draw);
  window.addEventListener("resize", draw);
}

/** Return the width of a chart in a holder, in which there are two in a row if there is room (style.css). */
export function chartWidth(holder) {
  const columns = holder.clientWidth >= 784 ? 2 : 1;
  return Math.max(300, Math.min(640, Math.floor((holder.clientWidth - 16 * (columns - 1)) / columns - 22)));
}

const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function lightness(hex) {
  const [r, g, b] = parts(hex).map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(one, other) {
  const [high, low] = [lightness(one), lightness(other)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}

/** Return the colour of a number of either sign; `most` and -most have the strongest ones. */
export function signed(number, most, { signed: stops }) {
  const place = (Math.max(-1, Math.min(1, number / most)) + 1) * 2;
  const from = Math.min(3, Math.floor(place));
  const [a, b] = [parts(stops[from]), parts(stops[from + 1])];
  return `#${a.map((x, i) => Math.round(x + (b[i] - x) * (place - from)).toString(16).padStart(2, "0")).join("")}`;
}

/** Return black or white, whichever is easier to read on a colour. */
export const inkOn = (colour) => (contrast("#000000", colour) >= contrast("#ffffff", colour) ? "#000000" : "#ffffff");

/** Return the colour itself if it can be seen on the page, else that of the page's text. */
export const visible = (colour, { back, text }) => (contrast(colour, back) >= 1.9 ? colour : text);
