// The colours of a page: the reader's own, until the button is pressed.
"use strict";

const root = document.documentElement;
const byId = (id) => document.getElementById(id);

function chooseTheme(name) {
  root.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "light" : "dark";
  byId("theme").setAttribute("aria-label", `change to ${byId("theme").textContent} colours`);
}

chooseTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
byId("theme").addEventListener("click", () => chooseTheme(root.dataset.theme === "dark" ? "light" : "dark"));
