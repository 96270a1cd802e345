// A picture as a list of shapes. The page shows it as SVG; a file is the same list as SVG or, through a canvas, as PNG.

const SVG = "http://www.w3.org/2000/svg";
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', 'DejaVu Sans', sans-serif";

export class Scene {
  constructor(width, height) {
    this.width = width;
    this.height = height;
    this.shapes = [];
  }

  /** Add a rectangle; `title` is shown where a mouse rests on it. */
  rect(x, y, width, height, fill, { stroke = "none", thickness = 1, radius = 0, title = "" } = {}) {
    this.shapes.push({ kind: "rect", x, y, width, height, fill, stroke, thickness, radius, title });
  }

  /** Add a line through points [x, y]; dash is the length of its dashes, 0 for none. */
  line(points, stroke, { thickness = 1, dash = 0 } = {}) {
    if (points.length > 1) this.shapes.push({ kind: "line", points, stroke, thickness, dash });
  }

  dot(x, y, radius, fill, title = "") {
    this.shapes.push({ kind: "dot", x, y, radius, fill, title });
  }

  /** Add a line of text; y is its base line. `upward` turns it by a quarter, to be read from below. */
  text(x, y, text, fill, { size = 12, anchor = "start", weight = 400, upward = false } = {}) {
    this.shapes.push({ kind: "text", x, y, text: String(text), fill, size, anchor, weight, upward });
  }

  /**
   * Add a table of coloured cells, which may be thousands: cells of one colour are one shape.
   * @param {string[][]} rows the colour of each cell, null where there is none
   */
  cells(x, y, width, height, rows) {
    const groups = {};
    rows.forEach((row, i) => row.forEach((colour, j) => { if (colour) (groups[colour] ??= []).push([i, j]); }));
    this.shapes.push({ kind: "cells", x, y, width, height, groups });
  }

  /** Add all shapes of another scene, moved by (dx, dy). */
  place(other, dx, dy) {
    for (const shape of other.shapes) {
      this.shapes.push(shape.points
        ? { ...shape, points: shape.points.map(([x, y]) => [x + dx, y + dy]) }
        : { ...shape, x: shape.x + dx, y: shape.y + dy });
    }
  }
}

const node = (name, attributes) => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};

const short = (number) => String(Math.round(number * 100) / 100);

function svgShape(s) {
  if (s.kind === "rect") {
    return node("rect", { x: short(s.x), y: short(s.y), width: short(s.width), height: short(s.height), rx: s.radius,
      fill: s.fill, stroke: s.stroke, "stroke-width": s.thickness });
  }
  if (s.kind === "line") {
    const made = node("polyline", { points: s.points.map((p) => p.map(short).join(",")).join(" "), fill: "none",
      stroke: s.stroke, "stroke-width": s.thickness, "stroke-linejoin": "round" });
    if (s.dash) made.setAttribute("stroke-dasharray", s.dash);
    return made;
  }
  if (s.kind === "cells") {
    const made = node("g", { "shape-rendering": "crispEdges" });
    for (const [fill, places] of Object.entries(s.groups)) {
      const d = places.map(([i, j]) => `M${short(s.x + j * s.width)} ${short(s.y + i * s.height)}h${s.width}v${s.height}h${-s.width}z`);
      made.append(node("path", { d: d.join(""), fill }));
    }
    return made;
  }
  if (s.kind === "dot") return node("circle", { cx: short(s.x), cy: short(s.y), r: s.radius, fill: s.fill });
  const made = node("text", { x: short(s.x), y: short(s.y), fill: s.fill, "font-size": s.size, "text-anchor": s.anchor,
    "font-weight": s.weight });
  if (s.upward) made.setAttribute("transform", `rotate(-90 ${short(s.x)} ${short(s.y)})`);
  made.textContent = s.text;
  return made;
}

/** Return a scene as an SVG element with a name for screen readers. */
export function svgOf(scene, label) {
  const { width, height } = scene;
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "font-family": FONT });
  const title = node("title", {});
  title.textContent = label;
  svg.append(title);
  for (const shape of scene.shapes) {
    const made = svgShape(shape);
    if (shape.title) {
      const words = node("title", {});
      words.textContent = shape.title;
      made.append(words);
    }
    svg.append(made);
  }
  return svg;
}

function paint(context, s) {
  if (s.kind === "rect") {
    context.beginPath();
    context.roundRect(s.x, s.y, s.width, s.height, s.radius);
    if (s.fill !== "none") { context.fillStyle = s.fill; context.fill(); }
    if (s.stroke !== "none") { context.strokeStyle = s.stroke; context.lineWidth = s.thickness; context.stroke(); }
  } else if (s.kind === "line") {
    context.beginPath();
    s.points.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.strokeStyle = s.stroke;
    context.lineWidth = s.thickness;
    context.lineJoin = "round";
    context.setLineDash(s.dash ? [s.dash, s.dash] : []);
    context.stroke();
    context.setLineDash([]);
  } else if (s.kind === "dot") {
    context.beginPath();
    context.arc(s.x, s.y, s.radius, 0, 2 * Math.PI);
    context.fillStyle = s.fill;
    context.fill();
  } else if (s.kind === "cells") {
    for (const [fill, places] of Object.entries(s.groups)) {
      context.fillStyle = fill;
      for (const [i, j] of places) context.fillRect(s.x + j * s.width, s.y + i * s.height, s.width, s.height);
    }
  } else {
    context.save();
    context.translate(s.x, s.y);
    if (s.upward) context.rotate(-Math.PI / 2);
    context.fillStyle = s.fill;
    context.font = `${s.weight} ${s.size}px ${FONT}`;
    context.textAlign = { start: "left", middle: "center", end: "right" }[s.anchor];
    context.fillText(s.text, 0, 0);
    context.restore();
  }
}

/** Return a scene as a PNG file's bytes, with the given number of dots per unit. */
async function pngOf(scene, dots = 2) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.ceil(scene.width * dots);
  canvas.height = Math.ceil(scene.height * dots);
  const context = canvas.getContext("2d");
  context.scale(dots, dots);
  for (const shape of scene.shapes) paint(context, shape);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

/** Save a scene as NAME.svg or NAME.png. */
export async function save(scene, name, kind) {
  const file = kind === "png" ? await pngOf(scene)
    : new Blob([new XMLSerializer().serializeToString(svgOf(scene, name))], { type: "image/svg+xml" });
  saveFile(file, `${name}.${kind}`);
}

/** Save a file under this name. */
export function saveFile(file, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
