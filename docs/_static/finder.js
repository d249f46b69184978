// Puts a field above the matrix of the page on support: any part of a family, a class or a hub name leaves its rows.
// `hubNames`, which the builder of the site writes, has the class of each published model's denoiser.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("#matrix table");
  if (!table) return;
  const plain = (text) => text.toLowerCase().replace(/[^a-z0-9]/g, "");
  const rows = [...table.tBodies[0].rows].slice(1); // the first has the classes of the strategies
  const names = rows.map((row) => {
    const own = row.cells[0].textContent;
    const hub = Object.entries(hubNames).filter(([, kind]) => own.includes(`(${kind})`));
    return [...own.split(/[()\n]/), ...hub.map(([name]) => name)].map(plain);
  });
  const field = document.createElement("input");
  const none = document.createElement("p");
  Object.assign(field, { type: "search", className: "finder", placeholder: "Find a model: qwen, Flux, FLUX.1-dev" });
  field.setAttribute("aria-label", "Find a model");
  none.textContent = "No row has that in its name. Another part of it may do, such as the family alone.";
  none.hidden = true;
  field.addEventListener("input", () => {
    const asked = plain(field.value);
    rows.forEach((row, place) => (row.hidden = !names[place].some((name) => name.includes(asked))));
    none.hidden = rows.some((row) => !row.hidden);
  });
  const frame = table.closest(".table-wrapper") ?? table;
  frame.before(field, none);
});
