// The page: which view is shown, its link, its files.

import { byId, copy } from "./dom.js";
import { MemoryView } from "./memory.js";
import { PlanView } from "./plan.js";
import { save } from "./scene.js";
import { onChange } from "./theme.js";

const views = {};
let current = null;
let held = false;

/** Show what went wrong; "" when all is well again. With `hold` it stays for the answer that comes next, too. */
function notice(text, hold = false) {
  if (!text && held) {
    held = false;
    return;
  }
  held = hold;
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

const say = (text) => { byId("status").textContent = text; };

/** Write the state of the view into the page's address. */
function linked() {
  if (!current) return;
  history.replaceState(null, "", `#${current.name}?${current.text}`);
  byId(`tab-${current.name}`).href = location.hash;
}

/** Show the view that the address names. */
function route() {
  const [name, ...rest] = location.hash.slice(1).split("?");
  const view = views[name] ?? views.memory;
  current = view;
  for (const other of Object.values(views)) {
    byId(other.name).hidden = other !== view;
    byId(`tab-${other.name}`).toggleAttribute("aria-current", other === view);
  }
  byId(`tab-${view.name}`).setAttribute("aria-current", "page");
  document.title = `${view.name === "plan" ? "Plan" : "Memory"} · lineate explore`;
  view.open(view.name === name ? rest.join("?") : "");
}

async function copyLink() {
  const own = byId("copy-link");
  try {
    await copy(location.href);
    own.textContent = "Copied";
  } catch {
    own.textContent = "Not copied";
  }
  setTimeout(() => { own.textContent = "Copy link"; }, 1500);
}

function saveAs(kind) {
  const scene = current?.picture();
  if (scene) save(scene, `lineate-${current.name}`, kind);
}

async function start() {
  try {
    const reply = await fetch("/api/about");
    if (!reply.ok) throw new Error(`status ${reply.status}`);
    const about = await reply.json();
    for (const view of [new MemoryView(about, { linked, notice, say }), new PlanView(about, { linked, notice, say })]) views[view.name] = view;
  } catch (error) {
    notice(`lineate explore does not answer (${error.message}); is it still running?`);
    return;
  }
  byId("copy-link").onclick = copyLink;
  byId("save-svg").onclick = () => saveAs("svg");
  byId("save-png").onclick = () => saveAs("png");
  byId("skip").onclick = (event) => { event.preventDefault(); byId("main").focus(); };
  window.addEventListener("hashchange", route);
  window.addEventListener("keydown", (event) => current.pressed?.(event));
  onChange(() => current.draw());
  route();
}

start();
