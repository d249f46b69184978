// The form that starts a job. Empty fields are left to the server, whose own values they show as placeholders.

import { call } from "./wire.js";
import { $, h, say } from "./words.js";

const SAVED = "partsong-form";
const FIELDS = ["prompt", "model", "strategy", "other", "width", "height", "steps", "frames", "count", "seed", "guidance", "negative"];
const OTHER = "other";
const HINTS = {
  auto: "The planner chooses, and says why.",
  serial: "One worker, no exchange. This is what others are compared with.",
  [OTHER]: "As on the command line. Several are joined with +.",
};

/** Says whether a number is none, or out of range. Which sizes a model takes is for the server to say. */
const isWrong = ({ validity, step }) => !validity.valid && !(validity.stepMismatch && step > 1);

/** Returns a file as an address that holds all of it. */
const whole = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
  reader.readAsDataURL(file);
});

const draw = () => crypto.getRandomValues(new Uint32Array(1))[0];

export class Composer {
  /** `onMade` gets the job that the server took. */
  constructor({ onMade }) {
    this.onMade = onMade;
    this.models = [];
    this.pictures = []; // addresses of those that the next job begins with
    $("pictures").addEventListener("change", () => this.begin([...$("pictures").files]));
    $("create-form").addEventListener("submit", (event) => { event.preventDefault(); this.make(); });
    $("create-form").addEventListener("input", () => this.keep());
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.make(); }
    });
    $("model").addEventListener("change", () => this.modelChanged());
    $("strategy").addEventListener("change", () => this.strategyChanged());
    $("new-seed").addEventListener("click", () => { $("seed").value = draw(); this.keep(); });
  }

  setModels(models) {
    if (this.models.length) this.keep();
    this.models = models;
    const groups = [["image", "Pictures"], ["video", "Videos"]].map(([kind, label]) => {
      const options = models.filter((model) => model.kind === kind).map((model) => h("option", { value: model.id }, model.id));
      return options.length ? h("optgroup", { label }, ...options) : null;
    });
    $("model").replaceChildren(...groups.filter(Boolean));
    this.restore();
  }

  get model() {
    return this.models.find((model) => model.id === $("model").value);
  }

  modelChanged() {
    const { model } = this;
    if (!model) return;
    const chosen = $("strategy").value;
    const names = ["auto", ...(model.strategies || []).filter((name) => name !== "auto" && name !== "serial"), "serial"];
    $("strategy").replaceChildren(...names.map((name) => h("option", { value: name }, name)), h("option", { value: OTHER }, "other…"));
    $("strategy").value = [...names, OTHER].includes(chosen) ? chosen : "auto";
    const video = model.kind === "video";
    for (const [id, shown] of [["frames", video], ["count", !video]]) $(id).closest(".field").hidden = !shown;
    const most = model.most_pictures || 0;
    $("pictures-field").hidden = !most;
    $("pictures").multiple = most > 1;
    $("pictures-label").textContent = most > 1 ? `Begin with pictures (${most} at most)` : "Begin with a picture";
    if (this.pictures.length > most) this.give([]);
    const defaults = model.defaults || {};
    for (const id of ["width", "height", "steps", "frames", "guidance"]) $(id).placeholder = defaults[id] ?? "";
    $("count").placeholder = "1";
    this.strategyChanged();
  }

  /** Takes files to begin with. */
  async begin(files) {
    say($("pictures-fault"), "");
    try {
      const most = this.model?.most_pictures || 0;
      if (files.length > most) throw new Error(`Choose ${most} at most.`);
      this.give(await Promise.all(files.map(whole)));
    } catch (fault) {
      this.give([]);
      say($("pictures-fault"), fault.message);
    }
  }

  give(pictures) {
    this.pictures = pictures;
    if (!pictures.length) $("pictures").value = "";
    $("given").replaceChildren(...pictures.map((src, place) => h("li", {}, h("img", { src, alt: `Picture ${place + 1} to begin with` }))));
  }

  strategyChanged() {
    const chosen = $("strategy").value;
    $("other-field").hidden = chosen !== OTHER;
    say($("strategy-hint"), HINTS[chosen]);
  }

  keep() {
    sessionStorage.setItem(SAVED, JSON.stringify(Object.fromEntries(FIELDS.map((id) => [id, $(id).value]))));
  }

  restore() {
    const saved = JSON.parse(sessionStorage.getItem(SAVED) || "{}");
    if (this.models.some((model) => model.id === saved.model)) $("model").value = saved.model;
    this.modelChanged();
    for (const id of FIELDS) if (saved[id] && id !== "model") $(id).value = saved[id];
    if (!$("strategy").value) $("strategy").value = "auto";
    this.strategyChanged();
  }

  /** Fills the form with what a job was made with. */
  reuse(job) {
    if (this.models.some((model) => model.id === job.model)) $("model").value = job.model;
    this.modelChanged();
    const [width, height] = (job.size || "x").split("x");
    const listed = [...$("strategy").options].some((option) => option.value === job.strategy);
    $("strategy").value = listed ? job.strategy : OTHER;
    const values = { prompt: job.prompt, other: listed ? "" : job.strategy, width, height, steps: job.steps, count: job.n, seed: job.seed };
    for (const [id, value] of Object.entries(values)) $(id).value = value ?? "";
    this.strategyChanged();
    this.keep();
    $("prompt").focus();
  }

  /** Returns the request, or null where a field is wrong; then that field has the focus and a sentence. */
  request() {
    const prompt = $("prompt").value.trim();
    say($("prompt-fault"), prompt ? "" : "Write what should be made.");
    $("prompt").setAttribute("aria-invalid", String(!prompt));
    if (!prompt) { $("prompt").focus(); return null; }
    const wrong = [...$("create-form").querySelectorAll("input[type=number]")].find((field) => field.offsetParent && isWrong(field));
    for (const field of $("create-form").querySelectorAll("input[type=number]")) field.setAttribute("aria-invalid", String(field === wrong));
    if (wrong) {
      say($("create-fault"), `${wrong.labels[0].textContent}: ${wrong.validationMessage}`);
      wrong.focus();
      return null;
    }
    return this.body(prompt);
  }

  body(prompt) {
    const value = (id) => ($(id).value === "" ? undefined : Number($(id).value));
    const defaults = this.model?.defaults || {};
    const [width, height] = [value("width"), value("height")];
    const size = width || height ? `${width || defaults.width || height}x${height || defaults.height || width}` : undefined;
    const video = this.model?.kind === "video";
    const strategy = $("strategy").value === OTHER ? $("other").value.trim() || "auto" : $("strategy").value;
    return {
      kind: video ? "video" : "image", model: $("model").value, prompt, strategy, size,
      n: video ? 1 : value("count") || 1, seed: value("seed") ?? draw(), num_inference_steps: value("steps"),
      guidance_scale: value("guidance"), negative_prompt: $("negative").value.trim() || undefined,
      num_frames: video ? value("frames") : undefined,
      pictures: this.pictures.length ? this.pictures : undefined,
    };
  }

  async make() {
    say($("create-fault"), "");
    const body = this.request();
    if (!body) return;
    $("make").disabled = true;
    try {
      this.onMade(await call("/v1/jobs", { method: "POST", body }));
    } catch (fault) {
      say($("create-fault"), fault.message);
    }
    $("make").disabled = false;
  }
}
