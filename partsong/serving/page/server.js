// How the server is, for operators: its models and their ranks, its users, the disk, and what failed last.

import { Fault, call } from "./wire.js";
import { $, bytes, h, number, seconds } from "./words.js";

const POLL = 3000;

export class ServerView {
  constructor() {
    this.timer = null;
    for (const action of ["restart", "calibrate"]) $(action).addEventListener("click", () => this.act(action));
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
    $("measure").hidden = state.measured && !state.measuring;
    $("calibrate").disabled = state.measuring;
    $("measure-words").textContent = state.measuring ? "This machine is being measured, which takes about a minute."
      : [state.measure_fault ? `The measurement failed: ${state.measure_fault}.` : "This machine was not measured.",
        "Strategies are a usual choice until it is."].join(" ");
    for (const [id, list] of [["users-card", state.users], ["errors-card", state.errors]]) $(id).hidden = !list.length;
  }

  rows(id, rows) {
    $(id).replaceChildren(...rows.map(([first, ...rest]) => h("tr", {}, h("th", { scope: "row" }, String(first)),
      ...rest.map((cell) => h("td", {}, String(cell))))));
  }

  /** Asks for something that an operator may; the next look shows what came of it. */
  async act(action) {
    $(action).disabled = true;
    try {
      await call(`/v1/operator/${action}`, { method: "POST" });
      await this.visit(this.shown);
    } catch (fault) {
      $("server-fault").textContent = fault.message;
      $("server-fault").hidden = false;
      $(action).disabled = false;
    }
    if (action === "restart") $(action).disabled = false;
  }
}

const ranks = (replica) => `${replica.ready ? "" : "starting, "}${replica.jobs} ${replica.jobs === 1 ? "job" : "jobs"}, ${bytes(replica.memory)}`;
