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
  const model = JSON.parse(await unpackText("model"));
  const timeline = model.steps.length ? await startTimeline(model) : null;
  byId("theme").addEventListener("click", () => {
    chooseTheme(root.dataset.theme === "dark" ? "light" : "dark");
    timeline?.draw();
  });
  preparePrint();
  await loadPlotly();
  for (const [id, figure] of Object.entries(model.figures)) await drawFigure(id, figure, timeline, model);
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

async function startTimeline(model) {
  const read = new Map();
  const timeline = new Timeline(byId("lanes"), async (number) => {
    if (!read.has(number)) {
      const facts = model.steps[number];
      read.set(number, new Step(facts, model.lanes[facts.attempt], await unpackBytes(`step-${number}`)));
    }
    return read.get(number);
  });
  const isMany = new Set(model.steps.map((facts) => facts.attempt)).size > 1;
  model.steps.forEach((facts, number) => {
    const of = isMany ? ` of attempt ${facts.attempt}` : "";
    const names = facts.names.length ? ` (${facts.names.join(", ")})` : "";
    byId("step").add(new Option(`${facts.step}${of}${names}`, number));
  });
  const presets = model.steps.flatMap((facts, number) => facts.names.map((name) => ({ name, number })));
  presets.sort((one, other) => model.presets.indexOf(one.name) - model.presets.indexOf(other.name));
  for (const preset of presets.filter(({ name }) => model.presets.includes(name))) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = preset.name;
    button.addEventListener("click", () => show(preset.number));
    preset.button = button;
    byId("presets").append(button);
  }
  async function show(number) {
    if (number < 0 || number >= model.steps.length) return;
    byId("step").value = number;
    byId("which").textContent = `step ${byId("step").selectedOptions[0].text}`;
    for (const { button, number: own } of presets) button?.setAttribute("aria-pressed", own === number);
    byId("path").disabled = !model.steps[number].path;
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
  await show(model.shown);
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
  } else if (document.readyState !== "complete") {
    await new Promise((resolve) => addEventListener("load", resolve));
  }
  if (typeof Plotly === "undefined") throw new Error("plotly did not load; the page without --cdn needs no network");
}

async function drawFigure(id, figure, timeline, model) {
  const place = byId(id);
  const options = { responsive: true, displayModeBar: false };
  await Plotly.newPlot(place, figure.data, figure.layout, options);
  if (!timeline) return;
  // A click on a step shows its timeline, or that of the nearest held step.
  place.on("plotly_click", ({ points }) => {
    const [attempt, step] = points[0].customdata ?? [];
    if (step === undefined) return;
    const apart = model.steps.map((facts) => (facts.attempt === attempt ? Math.abs(facts.step - step) : Infinity));
    const nearest = apart.indexOf(Math.min(...apart));
    if (apart[nearest] === Infinity) return;
    timeline.choose(nearest);
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

start()
  .catch((error) => {
    tell(`The pictures could not be drawn: ${error.message}`);
    console.error(error);
  })
  .finally(() =>
    requestAnimationFrame(() => {
      // For who waits for the page: when it was drawn, in ms, and how tall it is.
      root.dataset.height = root.scrollHeight;
      root.dataset.drawn = performance.now();
    }),
  );
