// The page of `vjob status --web`: tables that change in place, and the lines of all logs.
"use strict";

const MOST_LINES = 4000;
const root = document.documentElement;
const byId = (id) => document.getElementById(id);

function chooseTheme(name) {
  root.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "light" : "dark";
  byId("theme").setAttribute("aria-label", `change to ${byId("theme").textContent} colours`);
}

const lines = { elements: [], waiting: [], isReady: false };

function addLines(found) {
  const place = byId("lines");
  if (!place) {
    lines.waiting.push(...found); // the page is on its way
    return;
  }
  if (!lines.isReady) startLog(place);
  const added = [...lines.waiting.splice(0), ...found].map(makeLine);
  lines.elements.push(...added);
  place.append(...added);
  for (const old of lines.elements.splice(0, Math.max(0, lines.elements.length - MOST_LINES))) old.remove();
  if (byId("following").checked && added.length) place.scrollTop = place.scrollHeight;
}

function makeLine({ node, rank, file, text, kind }) {
  const line = document.createElement("div");
  const head = document.createElement("b");
  head.textContent = `${node}${file.endsWith(".err") ? " err" : ""} | ${rank === null ? "" : `${rank}: `}`;
  line.append(head, text);
  if (kind) line.className = "error";
  line.hidden = !isWanted(line);
  return line;
}

function isWanted(line) {
  const word = byId("filter").value.toLowerCase();
  return (!word || line.textContent.toLowerCase().includes(word)) && (!byId("errors").checked || line.className === "error");
}

function startLog(place) {
  lines.isReady = true;
  const filter = () => lines.elements.forEach((line) => (line.hidden = !isWanted(line)));
  byId("filter").addEventListener("input", filter);
  byId("errors").addEventListener("change", filter);
  byId("following").addEventListener("change", (event) => {
    if (event.target.checked) place.scrollTop = place.scrollHeight;
  });
  // Who scrolls up reads; who is at the end follows.
  place.addEventListener("scroll", () => {
    byId("following").checked = place.scrollTop + place.clientHeight > place.scrollHeight - 8;
  });
}

chooseTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
byId("theme").addEventListener("click", () => chooseTheme(root.dataset.theme === "dark" ? "light" : "dark"));
follow(
  async (changed) => {
    if (changed.has("page")) swapDocument(changed.get("page"));
    addLines([]);
  },
  (state) => addLines(state.lines ?? []),
);
