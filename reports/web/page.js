// Brings the page to life: the timeline first, then plotly and its figures.
"use strict";

const root = document.documentElement;
const byId = (id) => document.getElementById(id);

async function start() {
  chooseTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (typeof DecompressionStream === "undefined") {
    tell("This browser is too old for the pictures; findings and tables are whole. Any browser since 2023 will do.");
    return;
  }
  byId("theme").addEventListener("click", () => {
    chooseTheme(root.dataset.theme === "dark" ? "light" : "dark");
    shown.timeline?.draw();
  });
  preparePrint();
  if (typeof follow === "function") {
    startLive();
    return;
  }
  shown.model = JSON.parse(await unpackText("model"));
  if (shown.model.steps.length) await startTimeline((facts) => unpackBytes(`step-${shown.model.steps.indexOf(facts)}`));
  await loadPlotly();
  for (const [id, figure] of Object.entries(shown.model.figures)) await drawFigure(id, figure);
}

// What the page shows: the steps' facts, their timeline, and of a live page its figures.
const shown = { model: { steps: [] }, timeline: null, figures: new Map() };

// A live page: parts come again when they changed. The zoom of figures and timeline stays, and so
// does what was chosen.

function startLive() {
  const plotly = loadPlotly();
  const readStep = async (facts) => inflate((await fetchPart(facts.part)).body);
  follow(async (changed) => {
    if (changed.has("page")) swapDocument(changed.get("page"));
    if (changed.has("model")) {
      const model = JSON.parse(changed.get("model"));
      if (shown.timeline) await shown.timeline.update(model);
      else shown.model = model;
      if (!shown.timeline && model.steps.length && byId("lanes")) await startTimeline(readStep, { name: "last" });
    }
    for (const [name, text] of changed) if (name.startsWith("figure-")) shown.figures.set(name, JSON.parse(text));
    noteDrawn();
    await plotly;
    for (const [id, figure] of shown.figures) {
      const place = byId(id);
      if (place && (changed.has(id) || !place.classList.contains("js-plotly-plot"))) await drawFigure(id, figure);
    }
    noteDrawn();
  });
}

function tell(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = false;
}

function chooseTheme(name) {
  root.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "light" : "dark";
  byId("theme").setAttribute("aria-label", `change to ${byId("theme").textContent} colours`);
}

// The timeline and the tools above it.

// `choice`: the name of a step, or its attempt and number. A name goes along with the job: `last`
// is another step later.
async function startTimeline(readBytes, choice = null) {
  const read = new Map();
  const timeline = new Timeline(byId("lanes"), async (number) => {
    const facts = shown.model.steps[number];
    const name = facts.part ?? number;
    if (!read.has(name)) read.set(name, new Step(facts, shown.model.lanes[facts.attempt], await readBytes(facts)));
    read.get(name).facts = facts; // its names and its path may be others now
    return read.get(name);
  });
  shown.timeline = timeline;
  let buttons = [];

  function fillTools() {
    const { steps, presets } = shown.model;
    const isMany = new Set(steps.map((facts) => facts.attempt)).size > 1;
    const options = steps.map((facts, number) => {
      const of = isMany ? ` of attempt ${facts.attempt}` : "";
      const names = facts.names.length ? ` (${facts.names.join(", ")})` : "";
      return new Option(`${facts.step}${of}${names}`, number);
    });
    byId("step").replaceChildren(...options);
    const named = steps.flatMap((facts, number) => facts.names.map((name) => ({ name, number })));
    named.sort((one, other) => presets.indexOf(one.name) - presets.indexOf(other.name));
    const wanted = named.filter(({ name }) => presets.includes(name));
    if (buttons.map(({ name }) => name).join() !== wanted.map(({ name }) => name).join()) {
      buttons = wanted.map(({ name }) => ({ name, element: makeButton(name) }));
      byId("presets").replaceChildren(...buttons.map(({ element }) => element));
    }
    wanted.forEach(({ number }, at) => {
      buttons[at].number = number;
    });
  }

  function makeButton(name) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => show(shown.model.steps.findIndex(({ names }) => names.includes(name)), { name }));
    return button;
  }

  async function show(number, chosen = null, keepsView = false) {
    const facts = shown.model.steps[number];
    if (!facts) return;
    choice = chosen ?? { attempt: facts.attempt, step: facts.step };
    byId("step").value = number;
    byId("which").textContent = `step ${byId("step").selectedOptions[0].text}`;
    for (const { element, number: own } of buttons) element.setAttribute("aria-pressed", own === number);
    byId("path").disabled = !facts.path;
    await timeline.show(number, keepsView);
    drawLegend(timeline.step);
  }

  function findChosen({ name, attempt, step }) {
    return shown.model.steps.findIndex((facts) => (name ? facts.names.includes(name) : facts.attempt === attempt && facts.step === step));
  }

  // Of a live page. A step that is looked at closely stays, whatever has its name now.
  timeline.update = async (model) => {
    const now = timeline.step?.facts;
    const wanted = choice?.name && timeline.isWhole ? choice : { attempt: now?.attempt, step: now?.step };
    if (now && !model.steps.some((facts) => facts.attempt === now.attempt && facts.step === now.step)) {
      model.steps.push({ ...now, names: [] }); // the page holds fewer steps of a longer job
      model.steps.sort((one, other) => (one.attempt === other.attempt ? one.step - other.step : 0));
    }
    shown.model = model;
    const kept = new Set(model.steps.map(({ part }) => part));
    for (const name of read.keys()) if (!kept.has(name)) read.delete(name);
    fillTools();
    const number = findChosen(wanted);
    await show(number < 0 ? findChosen({ attempt: now?.attempt, step: now?.step }) : number, choice, true);
  };
  timeline.choose = show;
  byId("step").addEventListener("change", () => show(Number(byId("step").value)));
  byId("before").addEventListener("click", () => show(timeline.number - 1));
  byId("after").addEventListener("click", () => show(timeline.number + 1));
  byId("whole").addEventListener("click", () => timeline.showAll());
  byId("messages").addEventListener("change", (event) => timeline.showMessages(event.target.checked));
  byId("path").addEventListener("change", (event) => timeline.showPath(event.target.checked));
  byId("timeline").addEventListener("keydown", (event) => {
    if (event.key === "[") show(timeline.number - 1);
    if (event.key === "]") show(timeline.number + 1);
  });
  fillTools();
  const first = choice ? findChosen(choice) : -1;
  await show(first < 0 ? shown.model.shown : first, choice);
  return timeline;
}

function drawLegend(step) {
  const used = new Set(step.labels.map(({ kind }) => (KINDS.some(({ name }) => name === kind) ? kind : "other")));
  if (used.has("f")) used.add("F");
  const entries = KINDS.filter(({ name, text }) => text && used.has(name));
  const items = [...entries, { css: "wait", text: "waiting for a message" }].map(({ css, text }) => {
    const item = document.createElement("span");
    const box = document.createElement("i");
    box.style.background = `var(--kind-${css})`;
    item.append(box, text);
    return item;
  });
  byId("legend").replaceChildren(...items);
}

// Plotly's figures.

async function loadPlotly() {
  const packed = byId("plotly");
  if (packed) {
    const script = document.createElement("script");
    script.textContent = await unpackText("plotly");
    document.head.append(script);
    packed.remove();
  } else if (typeof follow === "function") {
    const script = document.createElement("script");
    script.src = "plotly.js";
    const loaded = new Promise((resolve, reject) => {
      script.onload = resolve;
      script.onerror = () => reject(new Error("plotly did not load"));
    });
    document.head.append(script);
    await loaded;
  } else if (document.readyState !== "complete") {
    await new Promise((resolve) => addEventListener("load", resolve));
  }
  if (typeof Plotly === "undefined") throw new Error("plotly did not load; the page without --cdn needs no network");
}

async function drawFigure(id, figure) {
  const place = byId(id);
  const options = { responsive: true, displayModeBar: false };
  const isNew = !place.classList.contains("js-plotly-plot");
  // With the same uirevision a figure that is drawn again keeps its zoom.
  await Plotly.react(place, figure.data, { uirevision: "kept", ...figure.layout }, options);
  if (!isNew) return;
  // A click on a step shows its timeline, or that of the nearest held step.
  place.on("plotly_click", ({ points }) => {
    const [attempt, step] = points[0].customdata ?? [];
    if (step === undefined || !shown.timeline) return;
    const apart = shown.model.steps.map((facts) => (facts.attempt === attempt ? Math.abs(facts.step - step) : Infinity));
    const nearest = apart.indexOf(Math.min(...apart));
    if (nearest < 0 || apart[nearest] === Infinity) return;
    shown.timeline.choose(nearest);
    byId("timeline").scrollIntoView({ behavior: "smooth" });
  });
}

// On paper all is light, and as wide as the paper. The timeline has a picture ready.

function preparePrint() {
  let theme = "light";
  addEventListener("beforeprint", () => {
    theme = root.dataset.theme;
    chooseTheme("light");
    resizeFigures((place) => (place.parentElement.classList.contains("half") ? PAPER_PX / 2 - 16 : PAPER_PX));
  });
  addEventListener("afterprint", () => {
    chooseTheme(theme);
    resizeFigures((place) => place.clientWidth);
  });
}

function resizeFigures(widthOf) {
  for (const place of document.querySelectorAll(".plot.js-plotly-plot")) Plotly.relayout(place, { width: widthOf(place) });
}

// For who waits for the page: when it was drawn, in ms, and how tall it is.
function noteDrawn() {
  requestAnimationFrame(() => {
    root.dataset.height = root.scrollHeight;
    root.dataset.drawn = performance.now();
  });
}

start()
  .catch((error) => {
    tell(`The pictures could not be drawn: ${error.message}`);
    console.error(error);
  })
  .finally(() => {
    if (typeof follow !== "function") noteDrawn();
  });
