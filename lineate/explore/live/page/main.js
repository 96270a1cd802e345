// The page: which view is shown, its link, its files.

import { byId, copy, make } from "./dom.js";
import { LearningView } from "./learning.js";
import { LessonsView } from "./lessons.js";
import { MemoryView } from "./memory.js";
import { ModelView } from "./model.js";
import { PlanView } from "./plan.js";
import { save, saveFile } from "./scene.js";
import { begin } from "./server.js";
import { onChange } from "./theme.js";

const VIEWS = [MemoryView, ModelView, LearningView, PlanView, LessonsView];

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

/** Show what a view has to say; an answer that comes after its view was left says nothing. */
function noticeOf(view, text, hold) {
  if (view === current) notice(text, hold);
}

/** Write the state of the view into the page's address. */
function linked(view) {
  if (view !== current) return;
  history.replaceState(null, "", `#${current.name}?${current.text}`);
  byId(`tab-${current.name}`).href = location.hash;
}

/** Say what a copy without a server has, with a link to each of its first pictures. */
function showKept({ title, views: parts }) {
  const list = (links) => make("ul", {}, ...links.map(({ href, label }) => make("li", {}, make("a", { href, textContent: label }))));
  byId("kept").append(make("summary", { textContent: title }),
    ...parts.flatMap(({ name, text, links }) => [make("h2", { textContent: name }), make("p", { textContent: text }), list(links)]));
  byId("kept").hidden = false;
}

/** Show the view that the address names. */
function route() {
  const [name, ...rest] = location.hash.slice(1).split("?");
  const view = views[name] ?? views.memory;
  if (current && current !== view) notice("");
  current = view;
  for (const other of Object.values(views)) {
    byId(other.name).hidden = other !== view;
    byId(`tab-${other.name}`).toggleAttribute("aria-current", other === view);
  }
  byId(`tab-${view.name}`).setAttribute("aria-current", "page");
  byId("save-svg").hidden = Boolean(view.bitmaps);
  document.title = `${byId(`tab-${view.name}`).textContent} · lineate explore`;
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
  const picture = current?.picture();
  if (picture?.file) saveFile(picture.file, `lineate-${picture.name}`);
  else if (picture) save(picture, `lineate-${current.name}`, kind);
}

async function start() {
  try {
    const about = await begin();
    for (const View of VIEWS) {
      const view = new View(about, { linked: () => linked(view), notice: (text, hold) => noticeOf(view, text, hold), say });
      views[view.name] = view;
    }
    if (about.kept) showKept(about.kept);
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
