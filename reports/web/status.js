// The page of `vjob status --web`: tables that change in place, and the lines of all logs.
"use strict";

const MOST_LINES = 4000;
const MOST_COMPARED = 8;

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

// Tables: rows in the order of a column, those that have a word, and those to be compared. All of it
// outlives a table that is replaced.

const view = { orders: {}, compared: new Set() };

function arrangeTables() {
  for (const section of document.querySelectorAll("main section")) {
    const body = section.querySelector("tbody");
    if (!body) continue;
    sortRows(section, body, view.orders[section.id]);
    const word = byId(`${section.id}-word`)?.value.toLowerCase() ?? "";
    for (const row of body.rows) row.hidden = Boolean(word) && !row.textContent.toLowerCase().includes(word);
    for (const box of body.querySelectorAll("input")) {
      box.checked = view.compared.has(box.value);
      box.disabled = !box.checked && view.compared.size >= MOST_COMPARED;
    }
  }
  const link = byId("compare");
  if (!link) return;
  link.hidden = view.compared.size < 2;
  link.href = `compare/${[...view.compared].join("/")}/`;
  link.textContent = `compare ${view.compared.size} runs`;
}

function sortRows(section, body, order) {
  const heads = [...section.querySelectorAll("th")];
  const column = order ? heads.findIndex((head) => head.textContent === order.title) : -1;
  const sign = order?.isDown ? -1 : 1;
  heads.forEach((head, at) => {
    if (at === column) head.setAttribute("aria-sort", order.isDown ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
  const place = (row) => Number(row.dataset.at);
  const compare = (first, second) => {
    const [one, other] = [first, second].map((row) => row.cells[column]?.dataset.key);
    if (one === other || column < 0) return place(first) - place(second);
    if (one === undefined) return 1; // nothing known comes last, either way
    if (other === undefined) return -1;
    const difference = Number(one) - Number(other);
    return sign * (Number.isNaN(difference) ? one.localeCompare(other) : difference) || place(first) - place(second);
  };
  const rows = [...body.rows].sort(compare);
  if (rows.some((row, at) => row !== body.rows[at])) body.append(...rows);
}

document.addEventListener("click", (event) => {
  const head = event.target.closest?.("th");
  if (!head) return;
  const id = head.closest("section").id;
  const before = view.orders[id];
  const isDown = before?.title === head.textContent ? !before.isDown : head.hasAttribute("data-down");
  view.orders[id] = { title: head.textContent, isDown };
  arrangeTables();
});
document.addEventListener("input", (event) => {
  if (event.target.id?.endsWith("-word")) arrangeTables();
});
document.addEventListener("change", (event) => {
  const box = event.target;
  if (!box.matches("tbody input")) return;
  if (box.checked) view.compared.add(box.value);
  else view.compared.delete(box.value);
  arrangeTables();
});

follow(
  async (changed) => {
    if (changed.has("page")) swapDocument(changed.get("page"));
    arrangeTables();
    addLines([]);
  },
  (state) => addLines(state.lines ?? []),
);
