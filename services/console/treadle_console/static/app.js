// Connects to the console, keeps what it says, and draws the page that the address names.
import { render } from "./vendor/lit-html.js";
import { meshPage } from "./mesh.js";
import { onPointer, paint } from "./pictures.js";
import { comparePage, stepsPage } from "./steps.js";
import { Store } from "./store.js";
import { tailPage } from "./tail.js";
import { listPage, trajectoryPage } from "./trajectories.js";

const SILENCE_MS = 25000; // the server says something at least every 10 s
const RETRY_MS = 1000;
const THEMES = ["system", "light", "dark"];

// The cookie that came with this page is enough from now on.
if (window.location.search) window.history.replaceState(null, "", `/${window.location.hash}`);

const store = new Store();
const main = document.getElementById("main");
const line = { open: false, heard_ms: Date.now(), last_id: "", source: null, retry: 0 };

// The address names the page: #/, #/trajectories, #/t/ID, #/steps, #/compare/A/B, #/tail.
function page() {
  const [name, ...rest] = window.location.hash.replace(/^#\/?/, "").split("/").map(decode);
  switch (name) {
    case "": return ["Mesh", "#/", meshPage(store, refresh)];
    case "trajectories": return ["Trajectories", "#/trajectories", listPage(store, refresh)];
    case "t": return [rest[0] ?? "", "#/trajectories", trajectoryPage(store, refresh, rest.join("/"))];
    case "steps": return ["Steps", "#/steps", stepsPage(store, refresh)];
    case "compare": return ["Side by side", "#/steps", comparePage(store, refresh, rest)];
    case "tail": return ["Long tails", "#/tail", tailPage(store, refresh)];
    default: return ["Mesh", "#/", meshPage(store, refresh)];
  }
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

let due = false;
function refresh() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    draw();
  });
}

function draw() {
  const [title, address, content] = page();
  document.title = `${title} · Treadle console`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === address) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  render(content, main);
  paint(store);
  say();
  // What a test or a person with the inspector can read: the newest fact that is on the screen, and since when.
  document.body.dataset.heard = store.heard_ms;
  document.body.dataset.painted = Date.now();
  document.body.dataset.rows = store.rows.size;
  document.body.dataset.events = store.events.at(-1)?.at_ms ?? 0;
}

// Words change once a second at most, so that a screen reader is not kept busy.
let words = "";
function say() {
  const status = document.getElementById("status");
  const next = line.open ? "Live" : "Connection lost, trying again";
  if (next !== words) {
    words = next;
    status.textContent = next;
    status.classList.toggle("lost", !line.open);
  }
  const away = store.sections.scheduler?.away;
  const banner = document.getElementById("banner");
  const warning = away ? `The scheduler does not answer (${away}). Engines, jobs and priorities are as they were; what facts tell goes on.` : "";
  if (banner.textContent !== warning) banner.textContent = warning;
}

function connect() {
  clearTimeout(line.retry);
  line.source?.close();
  const source = new EventSource(`/api/events${line.last_id ? `?after=${line.last_id}` : ""}`);
  line.source = source;
  line.heard_ms = Date.now();
  source.onmessage = (event) => {
    line.last_id = event.lastEventId;
    line.heard_ms = Date.now();
    line.open = true;
    store.apply(JSON.parse(event.data));
    refresh();
  };
  source.onerror = () => {
    line.open = false;
    refresh();
    // A browser tries again by itself, but not after an answer that is no stream.
    if (source.readyState === EventSource.CLOSED) line.retry = setTimeout(connect, RETRY_MS);
  };
}

setInterval(() => {
  if (Date.now() - line.heard_ms > SILENCE_MS) {
    line.open = false;
    connect();
  }
  refresh(); // time goes on where nothing happens
}, 1000);

// null where the browser keeps nothing for this site: the theme then lasts as long as the page.
function stored(use) {
  try {
    return use(localStorage);
  } catch {
    return null;
  }
}

let theme = stored((kept) => kept.getItem("treadle-theme"));
function setTheme(name) {
  theme = THEMES.includes(name) ? name : THEMES[0];
  const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = theme === "system" ? (dark ? "dark" : "light") : theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  stored((kept) => kept.setItem("treadle-theme", theme));
  refresh();
}

document.getElementById("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(theme));
window.addEventListener("resize", refresh);
window.addEventListener("hashchange", () => {
  document.getElementById("confirm").close("no");
  draw();
  main.focus();
  window.scrollTo(0, 0);
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the page
  main.focus();
});
const dialog = document.getElementById("confirm");
document.getElementById("confirm-no").addEventListener("click", () => dialog.close("no"));
document.getElementById("confirm-yes").addEventListener("click", () => dialog.close("yes"));
onPointer(refresh);
setTheme(theme);
connect();
draw();
