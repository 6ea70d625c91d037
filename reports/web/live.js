// A page that vjob serves: asks what is new, and puts it in where nobody is at work right now.
"use strict";

const RETRY_MOST_S = 5;
const OLD_ADDRESS =
  "vjob does not serve this address any more. What is shown stays; run the command again, and open the address that it prints.";

// Until the job is over: `update(changed)` puts in the texts of the parts that changed, by name. What
// the server says beside them, such as new lines of logs, goes to `take`.
async function follow(update, take = () => {}) {
  let version = 0;
  let known = {};
  let after = 0;
  let failures = 0;
  let failedAt = null;
  for (;;) {
    await untilVisible();
    let pause_s = 1;
    try {
      const answer = await fetch(`state?since=${version}&after=${after}`, { cache: "no-store" });
      if (answer.status === 403) {
        sayLive(OLD_ADDRESS, true);
        return;
      }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const state = await answer.json();
      if (state.parts) {
        const names = Object.keys(state.parts).filter((name) => known[name] !== state.parts[name]);
        const texts = await Promise.all(names.map(async (name) => [name, await (await fetchPart(state.parts[name])).text()]));
        await untilReleased();
        await update(new Map(texts));
        [known, version] = [state.parts, state.version];
        document.documentElement.dataset.version = version;
      }
      take(state);
      after = state.last ?? after;
      failures = 0;
      failedAt = null;
      sayLive(state.note, state.is_trouble || state.is_over);
      if (state.is_over) return;
      pause_s = state.every_s;
    } catch (error) {
      failures += 1;
      failedAt ??= new Date();
      pause_s = Math.min(2 ** (failures - 1), RETRY_MOST_S);
      // One question that is lost is no news: the address may have changed between a state and its parts.
      if (failures > 1) {
        sayLive(`No answer from vjob since ${failedAt.toLocaleTimeString()}: what is shown is as of then. Trying again.`, true);
        if (!(error instanceof TypeError)) console.warn(error.message);
      }
    }
    await pause(pause_s);
  }
}

async function fetchPart(key) {
  const answer = await fetch(`part/${key}`);
  if (!answer.ok) throw new Error(`part ${key}: status ${answer.status}`);
  return answer;
}

function sayLive(text, isMarked) {
  const place = document.getElementById("live");
  place.className = isMarked ? "partial" : "from";
  place.hidden = !text;
  if (place.textContent !== text) place.textContent = text; // it is read aloud
}

function pause(seconds) {
  return new Promise((resolve) => {
    const due = setTimeout(done, 1000 * seconds);
    addEventListener("online", done);
    function done() {
      clearTimeout(due);
      removeEventListener("online", done);
      resolve();
    }
  });
}

// A tab that nobody sees asks nothing.
function untilVisible() {
  if (document.visibilityState === "visible") return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", () => resolve(untilVisible()), { once: true }));
}

// Nothing moves under a pointer that is down, nor before its click has arrived.
const held = { isDown: false, released: [] };
for (const [name, isDown] of [["pointerdown", true], ["pointerup", false], ["pointercancel", false]]) {
  addEventListener(name, () => {
    held.isDown = isDown;
    if (!isDown) setTimeout(() => held.isDown || held.released.splice(0).forEach((resolve) => resolve()));
  }, true);
}

function untilReleased() {
  return held.isDown ? new Promise((resolve) => held.released.push(resolve)) : Promise.resolve();
}

// The document: blocks whose text changed are replaced. What has a life of its own (a figure, or
// whatever has `data-keep`) goes along, and so do scrolled places and what was opened.

const written = new WeakMap(); // of each block the text that it was made of

function swapDocument(text) {
  const next = new DOMParser().parseFromString(text, "text/html");
  document.title = next.title;
  swapBlock(document.querySelector("header"), next.querySelector("header"));
  const main = document.querySelector("main");
  const blocks = [...next.querySelector("main").children];
  const olds = new Map([...main.children].map((block, at) => [block.id || `block ${at}`, block]));
  let place = null;
  blocks.forEach((block, at) => {
    const name = block.id || `block ${at}`;
    const old = olds.get(name);
    olds.delete(name);
    const kept = old ? swapBlock(old, block) : take(block);
    const before = place ? place.nextSibling : main.firstChild;
    if (before !== kept) main.insertBefore(kept, before);
    place = kept;
  });
  for (const old of olds.values()) old.remove();

  function take(block) {
    const node = document.importNode(block, true);
    written.set(node, block.outerHTML);
    return node;
  }

  // The node that stands there now.
  function swapBlock(old, block) {
    if (written.get(old) === block.outerHTML || isInUse(old) || (old.matches("[data-keep]") && written.has(old))) return old;
    const node = take(block);
    const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
    const scrolled = [...old.querySelectorAll(".scroll")].map((element) => [element.scrollLeft, element.scrollTop]);
    for (const element of node.querySelectorAll(".plot[id], [data-keep][id]")) {
      const own = old.querySelector(`[id="${element.id}"]`);
      if (own) element.replaceWith(own);
    }
    const opened = [...old.querySelectorAll("details")].map((element) => element.open);
    [...node.querySelectorAll("details")].forEach((element, at) => {
      element.open = opened[at] ?? element.open;
    });
    old.replaceWith(node);
    [...node.querySelectorAll(".scroll")].forEach((element, at) => element.scrollTo(...(scrolled[at] ?? [0, 0])));
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    return node;
  }
}

// Somebody marks text in it, to copy it: it waits for the next time.
function isInUse(block) {
  const marked = getSelection();
  return marked && !marked.isCollapsed && block.contains(marked.anchorNode);
}
