// Brings the page to life: the timeline first, then charts, and plotly where a figure needs it.
"use strict";

async function start() {
  if (typeof DecompressionStream === "undefined") {
    tell("This browser is too old for the pictures; findings and tables are whole. Any browser since 2023 will do.");
    return;
  }
  byId("theme").addEventListener("click", () => shown.timeline?.draw());
  preparePrint();
  shown.model = JSON.parse(await unpackText("model"));
  if (shown.model.steps.length) await startTimeline((facts) => unpackBytes(`step-${shown.model.steps.indexOf(facts)}`));
  await new Promise((done) => setTimeout(done, 20)); // a frame: the text and the timeline are seen first
  for (const [id, figure] of Object.entries(shown.model.charts)) new Chart(byId(id), figure, chooseStep);
  const figures = Object.entries(shown.model.figures);
  if (figures.length) await loadPlotly();
  for (const [id, figure] of figures) await drawFigure(id, figure);
}

// What the page shows: the steps' facts, and their timeline.
const shown = { model: { steps: [] }, timeline: null };

function tell(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = false;
}

// The timeline and the tools above it.

async function startTimeline(readBytes) {
  const read = new Map();
  const timeline = new Timeline(byId("lanes"), async (number) => {
    const facts = shown.model.steps[number];
    if (!read.has(number)) read.set(number, new Step(facts, shown.model.lanes[facts.attempt], await readBytes(facts)));
    return read.get(number);
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
    buttons = wanted.map(({ name, number }) => ({ number, element: makeButton(name, number) }));
    byId("presets").replaceChildren(...buttons.map(({ element }) => element));
  }

  function makeButton(name, number) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => show(number));
    return button;
  }

  async function show(number) {
    const facts = shown.model.steps[number];
    if (!facts) return;
    byId("step").value = number;
    byId("which").textContent = `step ${byId("step").selectedOptions[0].text}`;
    for (const { element, number: own } of buttons) element.setAttribute("aria-pressed", own === number);
    byId("path").disabled = !facts.path;
    await timeline.show(number);
    drawLegend(timeline.step);
  }

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
  await show(shown.model.shown);
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

// A click on a step shows its timeline, or that of the nearest held step.
function chooseStep([attempt, step]) {
  if (step === undefined || !shown.timeline) return;
  const apart = shown.model.steps.map((facts) => (facts.attempt === attempt ? Math.abs(facts.step - step) : Infinity));
  const nearest = apart.indexOf(Math.min(...apart));
  if (nearest < 0 || apart[nearest] === Infinity) return;
  shown.timeline.choose(nearest);
  byId("timeline").scrollIntoView({ behavior: "smooth" });
}

// Plotly's figures.

async function loadPlotly() {
  const script = document.createElement("script");
  script.textContent = await unpackText("plotly");
  document.head.append(script);
  byId("plotly").remove();
}

async function drawFigure(id, figure) {
  const place = byId(id);
  const options = { responsive: true, displayModeBar: false };
  await Plotly.newPlot(place, figure.data, figure.layout, options);
  place.on("plotly_click", ({ points }) => chooseStep(points[0].customdata ?? []));
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

// For who waits for the page: when it was drawn, in ms.
function noteDrawn() {
  requestAnimationFrame(() => {
    root.dataset.drawn = performance.now();
  });
}

start()
  .catch((error) => {
    tell(`The pictures could not be drawn: ${error.message}`);
    console.error(error);
  })
  .finally(noteDrawn);
