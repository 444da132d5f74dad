// Controls, keys, downloads, the prompt box, and the first drawing of everything.

function pick(change) {
  Object.assign(state, change);
  state.source = Math.min(state.source, state.read);
  writeAddress();
  draw();
}
function draw() {
  leave();
  markToken();
  drawSummary();
  drawControls();
  drawGrid();
  drawWithout();
  drawScatter();
  drawLens();
  drawSizes();
  drawExperts();
}
function drawControls() {
  const effects = models.some((model) => model.removedAt), set = (key) => [() => state[key], (value) => pick({ [key]: value })];
  const focused = document.activeElement?.name, again = (id, node) => host(id).replaceChildren(...(node ? [node] : []));
  again("values", choice("show", "Show", [["share", "shares"], ["weight", "weights"], ["brought", "weight × size"], ...(effects ? [["effect", "effects"]] : [])], ...set("value")));
  const names = models[0].parts.map((part) => part.name);
  again("parts", names.length ? choice("part", names[0].startsWith("head") ? "Heads" : "Input", [...(names[0].startsWith("head") ? [["", "mean"]] : [["", "query"]]), ...names.slice(names[0].startsWith("head") ? 0 : 1).map((name) => [name, name.replace("head ", "")])], ...set("part")) : null);
  again("scope", effects ? choice("away", "Taken away", [["read", "at this read"], ["all", "at all reads"]], ...set("scope")) : null);
  if (focused) document.querySelector(`input[name="${focused}"]:checked`)?.focus();
  const kinds = [...new Set(models.flatMap((model) => model.kinds))];
  host("kinds").replaceChildren(...kinds.map((kind) => make("span", {}, letterOf(kind), ` ${kindOf(kind)[1]}`)), make("span", {}, make("span", { class: "kindletter c0" }, "e"), " embedding"));
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("textarea, svg[tabindex], input, .tokens, .tall")) return;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step) pick({ token: state.token === "all" ? (step > 0 ? 0 : "all") : state.token + step < 0 ? "all" : Math.min(state.token + step, tokens.length - 1) });
  else if (event.key === "a") pick({ token: "all" });
  else if (event.key === "x" && models.some((model) => model.removedAt)) pick({ scope: state.scope === "all" ? "read" : "all" });
  else return;
  event.preventDefault();
});

// Downloads: pictures of what is drawn, tables of what is chosen, and everything.

const addKey = (root, where, width, y) => y + 12;
const place = () => (state.token === "all" ? "average" : state.token);
const gridRows = () => [["model", "token", "read", "source", "weight", "weight_times_size", "loss_without_it_here"], ...models.flatMap((model) => Array.from({ length: model.depth + 1 }, (_, read) => {
  const weights = weightsOf(model, read), brought = broughtOf(model, read), effects = effectsOf(model, read);
  return weights.map((weight, source) => [model.name, place(), read, source, weight, brought[source], effects ? effects[source] : null]);
}).flat())];
const scatterRows = () => [["model", "token", "read", "source", along().column, "loss_without_it"], ...models.flatMap((model) => pointsOf(model).map(({ read, source, x, y }) => [model.name, place(), read === null ? "all" : read, source, x, y]))];
// What is said has no average: every token's.
const lensRows = () => [["model", "token", "part", "depth", "rank", "says", "probability"], ...models.flatMap((model) => tokensShown().flatMap((token) => [["read", model.reads], ["source", model.sources]].flatMap(([name, top]) =>
  Array.from({ length: model.depth + 1 }, (_, i) => topOf(top, i, token).map(({ place: at, p }, rank) => [model.name, token, name, i, rank, data.texts[at], p])).flat())))];
const sizeRows = () => [["model", "token", "depth", "read", "source"], ...models.flatMap((model) => Array.from({ length: model.depth + 1 }, (_, i) => [model.name, place(), i, pickOne(model.readSize, i, tokens.length), pickOne(model.sourceSize, i, tokens.length)]))];
function everything() {
  const lists = (value) => (ArrayBuffer.isView(value) ? [...value] : Array.isArray(value) ? value.map(lists) : value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([key, item]) => [key, lists(item)])) : value);
  return JSON.stringify({ texts: data.texts, tokens: data.tokens, models: models.map(lists) });
}
const SAVES = { grid: ["grid", "Who reads whom", gridRows], scatter: ["scatter", "Weight against effect", scatterRows], lens: [null, "What it says", lensRows], sizes: ["sizes", "Magnitude by depth", sizeRows], page: [null, "Everything", null] };
for (const where of document.querySelectorAll(".save")) {
  const name = where.dataset.save, [id, title, rows] = SAVES[name], button = (...what) => saveButton(where, title, ...what);
  const drawing = () => picture(host(id), title, name === "grid" ? host("scale").querySelector("svg") : null);
  if (id) button("PNG", "picture", () => rasterize(drawing(), (blob) => save(`${name}.png`, "image/png", blob)));
  if (id) button("SVG", "picture that scales", () => save(`${name}.svg`, "image/svg+xml", drawing().text));
  if (rows) button("CSV", "numbers as a table", () => save(`${name}.csv`, "text/csv", csv(rows())));
  else button("JSON", "all the numbers of this page", () => save("inspect.json", "application/json", everything()));
}

// Served, the page asks the model behind it. The address of the page is its key; nothing else is sent along.

async function ask(event) {
  event.preventDefault();
  const button = host("prompt").querySelector("button"), said = host("asked");
  button.disabled = true;
  said.className = "";
  said.textContent = "The model runs …";
  try {
    const answer = await fetch("inspect", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ prompt: host("words").value }) });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    show(found);
    said.textContent = `${tokens.length} tokens.`;
  } catch (error) {
    said.className = "wrong";
    said.textContent = error.message;
  }
  button.disabled = false;
}
function show(next) {
  load(next);
  drawTokens();
  history.replaceState(null, "", "#");  // what was chosen was of other words
  readAddress();
  draw();
}

load(data);
readAddress();
drawTokens();
draw();
if (data.served) {
  host("prompt").hidden = false;
  host("words").value = tokens.map((at) => data.texts[at]).join("");
  host("prompt").addEventListener("submit", ask);
  host("words").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) host("prompt").requestSubmit(); });
}
addEventListener("hashchange", () => { readAddress(); draw(); });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawTokens(); draw(); });
