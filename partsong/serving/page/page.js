// Begins the page: models, the job or chat that the address names, the key, and the server's health.

import { Fault, call, key } from "./wire.js";
import { Chat } from "./chat.js";
import { Composer } from "./compose.js";
import { Gallery } from "./gallery.js";
import { ServerView } from "./server.js";
import { Stage } from "./stage.js";
import { $, say } from "./words.js";

const HEALTH = 10000;

const gallery = new Gallery({ onFault: notify });
const composer = new Composer({ onMade: made });
const stage = new Stage({ onJob: (job) => gallery.put(job), onReuse: (job) => composer.reuse(job) });
const chat = new Chat({ onFault: notify });
const server = new ServerView();
const isNarrow = () => matchMedia("(max-width: 859px)").matches;

/** Shows what went wrong as a sentence. A missing or wrong key shows the field for it. */
function notify(fault) {
  if (!(fault instanceof Fault)) throw fault;
  if (fault.status === 401) return askKey(fault);
  $("notice-text").textContent = fault.message;
  $("notice").hidden = false;
  return undefined;
}

function askKey(fault) {
  say($("key-fault"), key.get() ? fault.message : "");
  key.forget();
  for (const id of ["create-view", "chat-view", "server-view", "views", "forget-key"]) $(id).hidden = true;
  $("key-form").hidden = false;
  $("key").value = "";
  $("key").focus();
}

function made(job) {
  gallery.put(job);
  history.pushState(null, "", `#job=${job.id}`);
  gallery.mark(job.id);
  show("create");
  stage.open(job.id, job, { intoView: isNarrow() }).catch(notify);
}

async function start() {
  start.failed = false;
  try {
    await offer();
  } catch (fault) {
    start.failed = true;
    return notify(fault);
  }
  $("notice").hidden = $("key-form").hidden = true;
  $("forget-key").hidden = !key.get();
  await route();
  return undefined;
}

/** Lists the models in both forms. Those of pictures name their strategies only once their ranks are there. */
async function offer() {
  const [{ data: models }, isOperator] = await Promise.all([call("/v1/models"), server.offered()]);
  const draws = models.filter((model) => ["image", "video"].includes(model.kind));
  const talks = models.filter((model) => ["text", "thinking"].includes(model.kind));
  $("to-server").hidden = !isOperator;
  $("to-create").hidden = !draws.length;
  $("to-chat").hidden = !talks.length;
  $("views").hidden = [...$("views").children].filter((link) => !link.hidden).length < 2;
  start.first = draws.length ? "create" : "chat";
  if (draws.length) composer.setModels(draws);
  if (talks.length) chat.setModels(talks);
}

/** Shows what the address names. Without a name it is the job that runs now, so that a reload loses nothing. */
async function route() {
  const place = location.hash.slice(1);
  const id = place.startsWith("job=") ? decodeURIComponent(place.slice(4)) : null;
  $("notice").hidden = true; // it was about the place before
  show(place === "server" ? "server" : place === "chat" || (!place && start.first === "chat") ? "chat" : "create");
  if (start.first !== "create" || place === "server") return;
  try {
    if (!gallery.jobs.size) await gallery.refresh();
    if (location.hash.slice(1) !== place) return; // the address has changed meanwhile, and who changed it shows that
    const running = place ? null : [...gallery.jobs.values()].find((job) => job.status === "in_progress" && job.kind !== "chat" && !job.twin_of);
    gallery.mark(id || running?.id);
    if (id || running) await stage.open(id || running.id, null, { intoView: Boolean(id) && isNarrow() });
    else if (place !== "chat") { stage.close(); gallery.render(); }
  } catch (fault) {
    notify(fault);
  }
}

function show(view) {
  server.visit(view === "server");
  for (const name of ["create", "chat", "server"]) {
    $(`${name}-view`).hidden = name !== view;
    if (name === view) $(`to-${name}`).setAttribute("aria-current", "page");
    else $(`to-${name}`).removeAttribute("aria-current");
  }
}

async function health() {
  const before = $("health").dataset.good;
  let fault = null;
  try {
    await call("/ready");
  } catch (error) {
    fault = error;
  }
  const word = !fault ? "ready" : fault.status === 503 ? "starting" : fault.status ? "unknown" : "no answer";
  $("health").dataset.good = fault ? (fault.status === 503 ? "soon" : "false") : "true";
  $("health-text").textContent = word;
  say($("model-hint"), fault?.status === 503 ? fault.message : "");
  if (!fault && before === "soon" && start.first) offer().catch(notify);
  else if (!fault && start.failed && $("key-form").hidden) start(); // the server was not there when the page began
  setTimeout(health, fault ? HEALTH / 5 : HEALTH);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  start();
});
$("forget-key").addEventListener("click", () => { key.forget(); location.reload(); });
$("notice-close").addEventListener("click", () => { $("notice").hidden = true; });
addEventListener("hashchange", route);
start();
health();
