// Fetches the page again and puts what has changed in place of what is shown.
"use strict";

const INTERVAL = 2000;
const PATIENCE = 10000;
const link = document.getElementById("link");
const main = document.querySelector("main");
let timer;
let looking = false;

function say(text, away) {
  document.documentElement.classList.toggle("away", away);
  if (link.textContent !== text) link.textContent = text;
}

function selecting() {
  const selection = document.getSelection();
  return selection !== null && !selection.isCollapsed && main.contains(selection.anchorNode);
}

// What has the focus, in terms that hold for the next picture too.
function focused() {
  const element = document.activeElement;
  if (!main.contains(element)) return null;
  const details = element.closest("details[id]");
  if (element.localName === "summary" && details) return `#${details.id} > summary`;
  return element.localName === "a" ? `a[href="${CSS.escape(element.getAttribute("href"))}"]` : null;
}

function show(fresh) {
  const focus = focused();
  for (const details of main.querySelectorAll("details[id]")) {
    const next = fresh.querySelector(`#${details.id}`);
    if (next) next.open = details.open;
  }
  const before = [...main.children];
  const after = [...fresh.children];
  if (before.length === after.length && before.every((section, at) => section.id === after[at].id)) {
    before.forEach((section, at) => section.isEqualNode(after[at]) || section.replaceWith(after[at]));
  } else {
    main.replaceChildren(...after);
  }
  if (focus && !main.contains(document.activeElement)) main.querySelector(focus)?.focus({ preventScroll: true });
}

async function look() {
  if (document.hidden || looking) return;
  clearTimeout(timer);
  looking = true;
  try {
    const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.querySelector("body > main");
    if (!fresh) throw new Error(`it answers ${answer.status}`);
    if (!selecting()) {
      show(fresh);
      document.title = page.title;
    }
    say("Live", false);
  } catch {
    say("The coordinator cannot be reached: this is what it showed last", true);
  }
  looking = false;
  timer = setTimeout(look, INTERVAL);
}

document.addEventListener("visibilitychange", look);
say("Live", false);
timer = setTimeout(look, INTERVAL);
