// How the server is, for operators: its models and their ranks, its users, the disk, and what failed last.

import { Fault, call } from "./wire.js";
import { $, bytes, h, number, seconds } from "./words.js";

const POLL = 3000;

export class ServerView {
  constructor() {
    this.timer = null;
    $("restart").addEventListener("click", () => this.restart());
    document.addEventListener("visibilitychange", () => this.visit(this.shown));
  }

  /** Says whether the user may see this view. */
  async offered() {
    try {
      await call("/v1/operator");
      return true;
    } catch (fault) {
      if (fault instanceof Fault) return false;
      throw fault;
    }
  }

  /** Shows the view and keeps it current, or stops that. */
  async visit(shown) {
    this.shown = shown;
    clearTimeout(this.timer);
    if (!shown || document.hidden) return;
    try {
      this.render(await call("/v1/operator"));
      $("server-fault").hidden = true;
    } catch (fault) {
      $("server-fault").textContent = fault.message;
      $("server-fault").hidden = false;
    }
    this.timer = setTimeout(() => this.visit(this.shown), POLL);
  }

  render(state) {
    $("server-facts").textContent = [`up for ${seconds(state.up_seconds)}`, `${bytes(state.disk.free)} of the disk free`,
      state.unwritten_jobs ? `${number(state.unwritten_jobs)} jobs are not in the journal yet` : null,
      state.leaves ? "takes no further jobs" : null].filter(Boolean).join(" · ");
    this.rows("model-rows", state.models.map((model) => [model.id, model.trouble || (model.ready ? "ready" : "starting"),
      model.running ?? "", model.waiting ?? "", model.replicas ? model.replicas.map(ranks).join(" · ") : ""]));
    this.rows("user-rows", state.users.map((user) => [user.name || "operator", number(user.unfinished), number(user.jobs), seconds(user.seconds)]));
    this.rows("error-rows", state.errors.map((error) => [error.at ? new Date(1000 * error.at).toLocaleString() : "",
      error.model, error.user || "", error.message]));
    for (const [id, list] of [["users-card", state.users], ["errors-card", state.errors]]) $(id).hidden = !list.length;
  }

  rows(id, rows) {
    $(id).replaceChildren(...rows.map(([first, ...rest]) => h("tr", {}, h("th", { scope: "row" }, String(first)),
      ...rest.map((cell) => h("td", {}, String(cell))))));
  }

  async restart() {
    $("restart").disabled = true;
    try {
      await call("/v1/operator/restart", { method: "POST" });
    } catch (fault) {
      $("server-fault").textContent = fault.message;
      $("server-fault").hidden = false;
    }
    $("restart").disabled = false;
  }
}

const ranks = (replica) => `${replica.ready ? "" : "starting, "}${replica.jobs} jobs, ${bytes(replica.memory)}`;
