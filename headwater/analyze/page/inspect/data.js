// The inspector's data and what is chosen. Numbers come as fixed point in base64; what is chosen stands in the address.

let data = JSON.parse(host("data").textContent);
let models = [], tokens = [];
const state = { token: "all", read: 0, source: 0, value: "share", part: "", scope: "read" };

function unpack({ low, step, bytes, data: text }) {
  const raw = atob(text), found = new Float64Array(raw.length / bytes);
  for (let i = 0; i < found.length; i++) {
    let whole = 0;
    for (let k = bytes - 1; k >= 0; k--) whole = whole * 256 + raw.charCodeAt(i * bytes + k);
    found[i] = low + step * whole;
  }
  return found;
}
const unpackTop = (top) => top && { count: top.count, ids: unpack(top.ids), p: unpack(top.p) };
const unpackRemoval = (removal) => removal && { loss: unpack(removal.loss), top: unpackTop(removal.top) };
function load(next) {
  data = next;
  tokens = data.tokens;
  models = data.models.map((model, index) => ({
    ...model, index, depth: model.kinds.length, look: `c${index + 1}`,
    loss: unpack(model.loss), mixing: unpack(model.mixing), parts: model.parts.map((part) => ({ name: part.name, mixing: unpack(part.mixing) })),
    readSize: unpack(model.readSize), sourceSize: unpack(model.sourceSize), reads: unpackTop(model.reads), sources: unpackTop(model.sources),
    removed: unpackRemoval(model.removed), removedAt: unpackRemoval(model.removedAt),
    experts: model.experts.map((one) => ({ ...one, ...unpackTop(one) })),
  }));
}

// A token as one can see it: blanks have signs, and what would turn or hide the text around it is spelled out.
const SIGNS = { " ": "·", "\n": "↵", "\t": "⇥", "\r": "␍" };
const seen = (text) => text.replace(/[ \n\t\r]/g, (c) => SIGNS[c]).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);
const clip = (text, most = 40) => (text.length > most ? `${text.slice(0, most)}…` : text);
const words = (place) => clip(seen(data.texts[place]));
const tokenNode = (place) => make("bdi", { class: "token" }, words(place));

// One token's numbers, or their average: `values` holds rows of `length`. The last token has no loss: null.
const chosen = () => (state.token === "all" ? null : state.token);
const tokensShown = () => (chosen() === null ? [...tokens.keys()] : [chosen()]);
function pickOne(values, row, length, token = chosen()) {
  if (token !== null) return token < length ? values[row * length + token] : null;
  let sum = 0;
  for (let t = 0; t < length; t++) sum += values[row * length + t];
  return sum / length;
}
const pair = (read, source) => (read * (read + 1)) / 2 + source;
const matrixOf = (model) => model.parts.find((part) => part.name === state.part)?.mixing ?? model.mixing;
const averaged = (values, model) => values.length === pair(model.depth + 1, 0);  // over tokens, to save room: one number a pair
const rowOf = (values, model, read, length, token = chosen()) => Array.from({ length: read + 1 }, (_, source) =>
  (averaged(values, model) ? values[pair(read, source)] : pickOne(values, pair(read, source), length, token)));
const weightsOf = (model, read, token = chosen()) => rowOf(matrixOf(model), model, read, tokens.length, token);
const sharesOf = (model, read) => {
  const own = weightsOf(model, read), total = own.reduce((sum, value) => sum + Math.abs(value), 0) || 1;
  return own.map((value) => value / total);
};
const broughtOf = (model, read) => {  // weight times size: how large what comes from a source is
  const size = (source, token) => pickOne(model.sourceSize, source, tokens.length, token);
  const rows = tokensShown().map((token) => weightsOf(model, read, token).map((weight, source) => weight * size(source, token)));
  return rows[0].map((_, source) => average(rows.map((row) => row[source])));
};
const effectsOf = (model, read) => (model.removedAt ? rowOf(model.removedAt.loss, model, read, tokens.length - 1) : null);
const effectOf = (model, source) => (model.removed ? pickOne(model.removed.loss, source, tokens.length - 1) : null);
function topOf(top, row, token = chosen()) {
  if (!top || token === null) return [];
  const start = (row * tokens.length + token) * top.count;
  return Array.from({ length: top.count }, (_, i) => ({ place: top.ids[start + i], p: top.p[start + i] }));
}
const nextOf = (token = chosen()) => (token === null || token + 1 >= tokens.length ? null : tokens[token + 1]);

const KINDS = { attention: ["A", "attention", "c1"], mlp: ["M", "MLP", "c2"], kda: ["K", "KDA", "c3"], mla: ["L", "MLA", "c4"], moe: ["E", "MoE", "c5"], shortswa: ["W", "short window", "c7"], parallel: ["P", "attention and MLP", "c6"] };
const kindOf = (kind) => KINDS[kind] || [kind.slice(0, 1).toUpperCase(), kind, "c0"];
const letterOf = (kind) => make("span", { class: `kindletter ${kindOf(kind)[2]}` }, kindOf(kind)[0]);
const readName = (model, read) => (read < model.depth ? `Read ${read}, before ${kindOf(model.kinds[read])[1]}` : "Final read, before the output head");
const placeName = (model, read) => (read < model.depth ? `at read ${read} only` : "at the final read only");
const sourceName = (model, source) => (source ? `output of sublayer ${source - 1}, ${kindOf(model.kinds[source - 1])[1]}` : "embedding");
const sourceLetter = (model, source) => (source ? letterOf(model.kinds[source - 1]) : make("span", { class: "kindletter c0" }, "e"));
const swatch = (model) => make("i", { class: `key ${model.look}` });
const panelTitle = (model, ...more) => make("p", { class: "title" }, swatch(model), make("code", {}, ...parts(clip(model.name, 80))), ...more);
const percent = (p) => (p === null || p === undefined ? "—" : p < 0.001 ? "<0.1 %" : `${minus((100 * p).toPrecision(p < 0.0995 ? 2 : 3))} %`);
const nats = (value) => (value === null || value === undefined ? "—" : Math.abs(value) < 0.0005 ? "0.000" : `${value > 0 ? "+" : ""}${minus(value.toFixed(3))}`);

// The address: #token=5&read=9&source=3. What does not fit this page is ignored.
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), deepest = Math.max(...models.map((model) => model.depth));
  const whole = (name, most, other) => { const value = Number(given.get(name)); return given.get(name) !== null && Number.isInteger(value) && value >= 0 && value <= most ? value : other; };
  const start = opening();
  state.token = given.get("token") === "all" ? "all" : whole("token", tokens.length - 1, start.token);
  state.read = whole("read", deepest, deepest);
  const telling = start.source !== undefined && state.token === start.token && state.read === deepest;
  state.source = Math.min(state.read, whole("source", deepest, telling ? start.source : strongest(models.at(-1), state.read)));
  state.value = ["share", "weight", "brought", "effect"].find((value) => value === given.get("show")) || "share";
  if (state.value === "effect" && !models.some((model) => model.removedAt)) state.value = "share";
  state.part = models[0].parts.find((part) => part.name === given.get("part"))?.name || "";
  state.scope = given.get("away") === "all" || !models.some((model) => model.removedAt) ? "all" : "read";
}
// The page opens where the final read of the last model misses one source the most; without effects, at the token that the
// first model is surest of. What is said there must have letters, and some text before it.
function opening() {
  const first = Math.floor((tokens.length - 1) / 4), model = models.at(-1);
  const places = [...tokens.keys()].slice(first + 1, -1).filter((token) => data.texts[tokens[token + 1]].trim());
  if (!places.length) return { token: first };
  if (!model.removedAt || averaged(model.removedAt.loss, model)) return { token: places.reduce((best, token) => (models[0].loss[token] < models[0].loss[best] ? token : best)) };
  const effects = places.flatMap((token) => rowOf(model.removedAt.loss, model, model.depth, tokens.length - 1, token).map((change, source) => ({ token, source, change })));
  return effects.reduce((best, one) => (one.change > best.change ? one : best));
}
function strongest(model, read) {
  const own = weightsOf(model, Math.min(read, model.depth)).map(Math.abs);
  return own.reduce((best, value, i) => (value > own[best] ? i : best), 0);
}
function writeAddress() {
  if (location.protocol === "about:") return;  // inside a notebook's frame, which has no address
  const shown = { token: state.token, read: state.read, source: state.source, show: state.value, part: state.part, away: state.scope };
  history.replaceState(null, "", `#${new URLSearchParams(Object.entries(shown).filter(([, value]) => value !== ""))}`);
}
