// The page: which conversation is shown, what is typed, and what the buttons do.

import { say } from "./announce.js";
import { layers, models, samplingDefaults } from "./api.js";
import { Answers } from "./answers.js";
import { byId, hasPointer, make } from "./dom.js";
import { confirmDelete, editSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { largestLayer } from "./strip.js";
import { add, choose, fork, newConversation, path, versions } from "./tree.js";
import { Turn, keyForm, sends } from "./turns.js";

const DRAWING = 25; // milliseconds of a frame in which long answers are drawn; laying them out takes about twice as long

const store = new Store();
const known = { models: [], layers: [], defaults: {}, wantsKey: false };
const answers = new Answers(store, {
  model: async (name) => {
    await (known.models.length ? null : loading ?? loadModels());
    return chosenModel(name);
  },
  layers: () => known.layers, shown: (id) => id === current.id,
});
store.busy = (id) => answers.node(id) !== null;

/** Return the model that a conversation wants if the server has it, or else the server's first. */
function chosenModel(name) {
  return known.models.includes(name) ? name : known.models[0] ?? name ?? null;
}

const message = byId("message");
const scroll = byId("scroll");
let current = newConversation(store.settings);
let turns = new Map(); // the elements of the shown conversation, by the ids of their nodes
let followed = true; // whether the end of the conversation stays in sight while an answer grows
let drawing = false; // whether an answer that has grown is being drawn, or was a moment ago
const behind = new Set(); // the ids of turns that have more text than is shown
let loading = null; // the promise of the models, while they are being read

const sidebar = new Sidebar({
  create: () => { location.hash = ""; open(null); },
  rename: (id, title) => {
    const conversation = store.get(id);
    if (!conversation) return draw();
    if (conversation.title !== title) Object.assign(conversation, { title, named: true });
    store.save(conversation);
    draw();
  },
  remove: (id) => {
    const { title } = store.get(id);
    confirmDelete(`Delete “${title}”? It cannot be brought back.`, () => {
      answers.stop(id);
      store.remove(id);
      if (id === current.id) message.value = current.draft = "";
      say(`“${title}” was deleted.`);
      if (id === current.id) {
        location.hash = "";
        open(null);
      }
      draw();
      byId("new").focus();
    });
  },
});

/** Show a conversation; null shows a new one, which is kept once something is typed. */
function open(id) {
  saveDraft();
  current = (id && store.get(id)) || newConversation(store.settings);
  turns = new Map();
  byId("turns").replaceChildren();
  message.value = current.draft;
  followed = true;
  draw();
  fit();
  focusMessage();
}

/** Keep a conversation that is new, and put its id into the address, so that a reload shows it again. */
function keep() {
  store.save(current);
  if (location.hash !== `#${current.id}`) history.replaceState(null, "", `#${current.id}`);
}

/** Keep what is typed; the address stays, since it may name another conversation already. */
function saveDraft() {
  if (message.value === current.draft) return;
  current.draft = message.value;
  if (current.draft || path(current).length || current.named) store.save(current);
  else store.remove(current.id);
}

function keepDraft() {
  saveDraft();
  if (current.draft) keep();
}

function focusMessage() {
  if (hasPointer() && !sidebar.shown && !document.querySelector("dialog[open]")) message.focus();
}

/** Draw everything from the conversations as they are now. */
function draw() {
  current = store.get(current.id) ?? current; // another tab may have written it
  sidebar.update(store.list(), current.id, (id) => answers.node(id) !== null);
  byId("title").textContent = current.title;
  document.title = `${current.title} · lineate`;
  byId("model").textContent = chosenModel(current.settings.model) ?? "";
  drawTurns();
  const busy = answers.node(current.id) !== null;
  const held = document.activeElement === byId("send") || document.activeElement === byId("stop");
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  if (held) (busy ? byId("stop") : message).focus();
  follow();
}

function drawTurns() {
  const shown = path(current);
  const running = answers.node(current.id);
  const most = largestLayer(shown);
  const elements = [];
  let before = null;
  for (const [index, node] of shown.entries()) {
    if (!turns.has(node.id)) turns.set(node.id, new Turn(node, actions));
    const turn = turns.get(node.id);
    turn.update(node, {
      conversation: current, running: node === running, busy: running !== null, last: index === shown.length - 1, before, most,
    });
    if (!turn.complete) drawGrowth(node);
    elements.push(turn.element);
    if (node.role === "assistant" && node.usage) before = node;
  }
  if (!elements.length) elements.push(emptyPage());
  place(byId("turns"), elements);
}

/** Put these elements into a parent without moving those that are in place: a moved element loses its focus. */
function place(parent, elements) {
  const wanted = new Set(elements);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  for (const [index, element] of elements.entries()) {
    if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null);
  }
}

const emptyPage = () => make("div.empty", {},
  make("p.lead", { textContent: "Nothing has been said yet." }),
  make("p", { textContent: "Below each answer a strip shows how much of the prompt the server remembered, how fast it wrote, and what each layer keeps." }));

/** Keep the end in sight, unless the reader has scrolled away from it. */
function follow() {
  if (followed) scroll.scrollTop = scroll.scrollHeight;
  byId("to-end").hidden = followed;
}

/** Make the message box as high as its text, up to the limit of the style sheet. */
function fit() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + 2}px`;
}

const actions = {
  edit: (node, text) => ask(node.parent, text),
  again: (node) => run(() => answers.again(current, node)),
  answer: (node) => run(() => answers.start(current, node)),
  key: (node, key) => { useKey(key); run(() => answers.again(current, node)); },
  fork: (node) => {
    saveDraft();
    const copied = fork(current, node);
    store.save(copied);
    location.hash = copied.id;
    say("A new conversation begins with the turns up to this one.");
  },
  version: (node, step) => {
    const among = versions(current, node);
    const next = among[among.indexOf(node) + step];
    if (!next || answers.node(current.id)) return;
    choose(current, next);
    keep();
    draw();
    const row = turns.get(next.id).actionRow.querySelectorAll(".versions button:enabled");
    row[step < 0 ? 0 : row.length - 1]?.focus();
  },
};

/** Add a turn of the reader after `parent` and ask for its answer. */
function ask(parent, text) {
  const node = add(current, parent, "user", text);
  keep();
  run(() => answers.start(current, node));
}

function run(start) {
  followed = true;
  start();
  draw();
  focusMessage();
}

function send() {
  const text = message.value.trim();
  if (!text || answers.node(current.id)) return;
  message.value = "";
  current.draft = "";
  fit();
  ask(path(current).at(-1)?.id ?? null, text);
}

function useKey(key) {
  store.key = key;
  known.wantsKey = true;
  loadModels();
}

/** Show a line above the conversation, or take it away. */
function notice(...children) {
  byId("notice").replaceChildren(...children);
  byId("notice").hidden = children.length === 0;
}

function loadModels() {
  loading = readModels().finally(() => { loading = null; });
  return loading;
}

async function readModels() {
  try {
    known.models = await models(store.key);
    known.layers = await layers(store.key);
    known.defaults = await samplingDefaults(store.key);
    notice();
  } catch (error) {
    if (error.status === 401) {
      known.wantsKey = true;
      notice(make("p", { textContent: error.message }), keyForm(useKey));
    } else {
      notice(make("p", { textContent: `${error.message} What you write is kept.` }));
    }
  }
  draw();
}

byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("stop").addEventListener("click", () => answers.stop(current.id));
byId("to-end").addEventListener("click", () => { followed = true; follow(); message.focus(); });
byId("open-settings").addEventListener("click", () => {
  const { models, defaults, wantsKey } = known;
  editSettings({ settings: current.settings, models, defaults, key: store.key, wantsKey }, (settings, key) => {
    current.settings = settings;
    store.settings = settings;
    if (store.get(current.id)) store.save(current);
    if (key !== store.key) useKey(key);
    draw();
  });
});
message.addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  send();
});
let drafting = 0;
message.addEventListener("input", () => {
  fit();
  clearTimeout(drafting);
  drafting = setTimeout(() => { keepDraft(); draw(); }, 300);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) answers.stop(current.id);
});
scroll.addEventListener("scroll", () => {
  followed = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 48;
  byId("to-end").hidden = followed;
});
window.addEventListener("resize", () => { fit(); follow(); });
window.addEventListener("pagehide", keepDraft);
window.addEventListener("hashchange", () => {
  const id = location.hash.slice(1);
  if (id !== current.id && (store.get(id) || store.get(current.id))) open(id);
});

/** Draw more of an answer in the next frame. */
function drawGrowth(node) {
  if (!turns.has(node.id)) return;
  behind.add(node.id);
  if (!drawing) drawBehind();
}

/** Draw what there is for some milliseconds; when all is shown, nothing for as long as that took: a browser has more to do. */
function drawBehind() {
  drawing = true;
  requestAnimationFrame(() => {
    const begun = performance.now();
    for (const id of behind) {
      behind.delete(id);
      const turn = turns.get(id);
      turn?.grow();
      if (turn?.complete === false) behind.add(id); // after the others
      if (performance.now() - begun > DRAWING) break;
    }
    follow(); // lays the page out
    setTimeout(() => {
      drawing = false;
      if (behind.size) drawBehind();
    }, behind.size ? 0 : performance.now() - begun);
  });
}

answers.addEventListener("grown", ({ detail: node }) => drawGrowth(node));
answers.addEventListener("ended", ({ detail: { node } }) => {
  if (node.error?.status === 401) known.wantsKey = true;
  if (node.status === "done" && !known.models.length) loadModels(); // the server could not be reached before
  draw();
});
store.addEventListener("changed", draw);
store.addEventListener("full", () => notice(make("p", {
  textContent: "The browser's storage is full. New turns are kept only until this page closes; delete conversations to make room.",
})));

open(location.hash.slice(1) || null);
loadModels();
