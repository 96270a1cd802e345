// The view "Lessons": those of lineate learn. The server runs them; it is sent the number of a lesson and nothing else.

import { numberFrom, partsOf, stateOf } from "./controls.js";
import { button, byId, make } from "./dom.js";
import { Growing } from "./growing.js";
import { inline } from "./markdown.js";
import { answerTo } from "./server.js";

const ROW = /^\|(.*)\|\s*$/;
const RULE = /^[\s|:-]+$/; // the line below the head of a table

/** Return a table of Markdown as an element that scrolls by itself. */
function table(lines) {
  const [head, ...rows] = lines.filter((line) => !RULE.test(line)).map((line) => ROW.exec(line)[1].split("|").map((cell) => cell.trim()));
  const cells = (tag, row) => row.map((text) => make(tag, tag === "th" ? { scope: "col" } : {}, ...inline(text).nodes));
  return scrolled("Table", make("table", {}, make("thead", {}, make("tr", {}, ...cells(head.some(Boolean) ? "th" : "td", head))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row))))));
}

/** Return something wide in a box that scrolls by itself; the keyboard must reach it for that. */
const scrolled = (label, ...inside) => make("div.scroll", { tabIndex: 0, role: "region", "aria-label": label }, ...inside);

/** Return the elements of a text in Markdown without tables. */
function drawnText(text) {
  const box = make("div");
  new Growing(box).show(text);
  return [...box.children];
}

/** Return the elements of a text in Markdown; rows of a table are a paragraph of their own. */
function written(text) {
  const found = [];
  let others = [];
  const flush = () => {
    found.push(...drawnText(others.join("\n\n")));
    others = [];
  };
  for (const part of text.split(/\n{2,}/)) {
    const lines = part.split("\n").filter((line) => line.trim());
    if (lines.length && lines.every((line) => ROW.test(line))) {
      flush();
      found.push(table(lines));
    } else {
      others.push(part);
    }
  }
  flush();
  return found;
}

function program(code) {
  const [own] = drawnText(`\`\`\`\`python\n${code}\n\`\`\`\``);
  own.querySelector("pre").classList.add("scroll");
  return own;
}

const plain = (label, text) => scrolled(label, make("pre", { textContent: text }));

const title = (text) => make("h3", { textContent: text });

/** Return claims with their figures, and whether each holds. */
function claims(found) {
  return make("ul.claims", {}, ...found.map(({ says, shown, told, holds }) => make(holds ? "li" : "li.fails", {},
    make("strong", { textContent: holds ? "holds" : "FAILS" }), ` ${says}: ${told}`, make("code", { textContent: shown }))));
}

/** Return the bytes of a picture as a file. */
const fileOf = (picture) => new Blob([Uint8Array.from(atob(picture), (x) => x.charCodeAt(0))], { type: "image/png" });

/** Return a canvas with a picture: unlike an image, it needs no address that the page's policy would have to allow. */
function drawn(picture, caption) {
  const canvas = make("canvas", { role: "img", "aria-label": caption });
  createImageBitmap(fileOf(picture)).then((bitmap) => {
    Object.assign(canvas, { width: bitmap.width, height: bitmap.height });
    canvas.getContext("2d").drawImage(bitmap, 0, 0);
    canvas.dataset.drawn = "yes";
  });
  return canvas;
}

export class LessonsView {
  constructor(about, { linked, notice, say }) {
    this.name = "lessons";
    this.bitmaps = true; // its pictures are drawn by the server, so there is no SVG of them
    Object.assign(this, { list: about.lessons, linked, notice, say, contents: new Map(), results: new Map(), running: new Set() });
    this.label = about.kept ? "Show what running it gave" : "Run this program";
    this.usual = { lesson: 1, run: false, answer: false };
    this.state = this.usual;
    this.shown = null;
    byId("lesson-list").append(...this.list.map(({ number, name, title: words }) => make("li", {},
      make("a", { href: `#lessons?lesson=${number}`, "data-lesson": number, onclick: () => { this.chosen = true; } },
        make("span.number", { textContent: `${number}.` }), make("span.long", { textContent: words }), make("span.short", { textContent: name })))));
  }

  open(text) {
    this.state = stateOf(this, () => this.fromText(text));
    this.refresh();
    if (this.state.run && !this.results.has(this.state.lesson)) this.run();
  }

  fromText(text) {
    const read = {
      lesson: (word) => numberFrom(word, 1, this.list.length, true),
      run: (word) => numberFrom(word, 0, 1, true) === 1,
      answer: (word) => numberFrom(word, 0, 1, true) === 1,
    };
    const state = { ...this.usual };
    for (const [key, value] of Object.entries(partsOf(text))) {
      if (!(key in read)) throw new Error(`no setting ${key}`);
      state[key] = read[key](value);
    }
    state.run ||= this.results.has(state.lesson);
    return state;
  }

  get text() {
    const { lesson, run, answer } = this.state;
    return `lesson=${lesson}${run ? "&run=1" : ""}${answer ? "&answer=1" : ""}`;
  }

  async refresh() {
    const { lesson } = this.state;
    for (const link of byId("lesson-list").querySelectorAll("a")) link.toggleAttribute("aria-current", Number(link.dataset.lesson) === lesson);
    byId("lesson-list").querySelector("[aria-current]").setAttribute("aria-current", "true");
    this.linked();
    try {
      if (!this.contents.has(lesson)) this.contents.set(lesson, await answerTo("api/lessons", { lesson }));
    } catch (error) {
      this.notice(error.message);
      return;
    }
    if (lesson !== this.state.lesson) return;
    this.notice("");
    if (this.shown !== lesson) this.build(this.contents.get(lesson));
    byId("lesson-answer").open = this.state.answer;
    this.draw();
  }

  /** Put a lesson onto the page. */
  build(content) {
    const { lesson, opens } = content;
    this.shown = lesson;
    const heading = make("h2", { id: "lesson-title", tabIndex: -1, textContent: `${lesson}. ${content.title}` });
    const answer = make("details", { id: "lesson-answer", ontoggle: () => this.look(answer.open) }, make("summary", { textContent: "Answer" }),
      ...written(content.answer), content.answer_code ? program(content.answer_code) : null, make("div", { id: "lesson-answers" }));
    const next = this.list.find((one) => one.number === lesson + 1);
    byId("lesson").replaceChildren(...[
      heading, plain("Equation", content.equation), ...written(content.text),
      title("The program"), program(content.code),
      make("div.row", {}, button(this.label, () => this.run(), { id: "lesson-run" }), make("span.hint", { id: "lesson-state" })),
      make("div", { id: "lesson-outcome" }),
      title("Exercise"), ...written(content.question), answer,
      title("What breaks next"), ...written(content.next),
      next ? make("p", {}, make("a.go", { href: `#lessons?lesson=${next.number}`, textContent: `Next: ${next.number}. ${next.title}`, onclick: () => { this.chosen = true; } })) : null,
      title("In another view"), make("p", { textContent: opens.see }), make("p", {}, make("a.go", { href: opens.href, textContent: `Open ${opens.label}` })),
      ...(content.references.length ? [title("References"), make("ul.hint", {}, ...content.references.map((textContent) => make("li", { textContent })))] : []),
    ].filter(Boolean));
    if (this.chosen) heading.focus(); // a reader of the list goes on with the lesson, which is below it on a phone
    this.chosen = false;
  }

  look(answer) {
    if (answer === this.state.answer) return;
    this.state = { ...this.state, answer };
    this.linked();
  }

  async run() {
    const { lesson } = this.state;
    if (this.running.has(lesson)) return;
    this.running.add(lesson);
    this.state = { ...this.state, run: true };
    this.linked();
    this.draw();
    let wrong = "";
    try {
      this.results.set(lesson, await answerTo("api/lessons/run", { lesson }));
    } catch (error) {
      wrong = error.message;
    }
    this.running.delete(lesson);
    if (lesson !== this.state.lesson) return;
    if (wrong) this.state = { ...this.state, run: false };
    this.linked();
    this.notice(wrong);
    this.draw();
    if (!wrong) this.say(`Lesson ${lesson}: ${byId("lesson-state").textContent}`);
  }

  draw() {
    const { lesson } = this.state;
    if (this.shown !== lesson) return;
    const [running, result] = [this.running.has(lesson), this.results.get(lesson)];
    byId("lesson-run").disabled = running;
    const all = result ? [...result.findings, ...result.answers] : [];
    byId("lesson-state").textContent = running ? "It runs …" : !result ? "" : result.holds ? `All ${all.length} claims hold.`
      : `${all.filter((one) => !one.holds).length} of ${all.length} claims FAIL.`;
    if (this.drawn === result && result && byId("lesson-outcome").children.length) return;
    this.drawn = result;
    const { caption } = this.contents.get(lesson);
    byId("lesson-outcome").replaceChildren(...(!result ? [] : [
      title("It prints"), plain("What the program printed", result.printed),
      title("What is checked"), claims(result.findings),
      result.picture ? make("figure", {}, scrolled("Picture", drawn(result.picture, caption)), make("figcaption.hint", { textContent: caption }))
        : make("p.hint", { textContent: "The picture needs matplotlib: pip install 'lineate[plot]'." }),
    ]));
    byId("lesson-answers").replaceChildren(result ? claims(result.answers)
      : make("p.hint", { textContent: "What the answer says is checked when the program is run." }));
  }

  /** Return the picture as a file and its name. */
  picture() {
    const [result, content] = [this.results.get(this.state.lesson), this.contents.get(this.state.lesson)];
    return result?.picture && content ? { file: fileOf(result.picture), name: content.file } : null;
  }
}
