// Draws /picture.json once a second. Everything that came from other processes is put in as text.
"use strict";

const SECONDS = 1, HISTORY = 60, COLORS = 8, SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);
const history = new Map();  // server id -> rows per second, report by report
const heat = new Map();     // server id -> {at, counts, rates}: [layers][experts held]
let cells = null;           // what the heat map shows, for the pointer

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  return fill(element, attributes, children);
}
function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value);
  }
  element.append(...children.map((child) => child instanceof Node ? child : String(child)));
  return element;
}

// ---------------------------------------------------------------- values in few characters

function scaled(value, units, unitless = 3) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit + 1 < units.length) { value /= 1000; unit += 1; }
  const digits = Number.isInteger(value) || value >= 99.5 ? value.toFixed(0) : value.toPrecision(unitless);
  return digits + units[unit];
}
const amount = (value) => scaled(value, ["", " k", " M", " G"]);
const bytes = (value) => scaled(value, [" B", " kB", " MB", " GB", " TB"]);
const micros = (value) => scaled(value, [" µs", " ms", " s"], 2);
const speed = (value) => value === null || value === undefined ? "–" : `${bytes(value)}/s`;
const sum = (list, name) => list.reduce((total, item) => total + (item[name] || 0), 0);
const rate = (list, name) => list.some((item) => item[name] !== null) ? sum(list, name) : null;
const color = (seat) => `var(--s${seat % COLORS})`;

function duration(seconds) {
  const s = Math.floor(seconds), parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => s >= size);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).reduce(
    ({left, words}, [size, unit]) => ({left: left % size, words: [...words, `${Math.floor(left / size)} ${unit}`]}),
    {left: s, words: []}).words.join(" ");
}
function ranges(experts) {
  const parts = [];
  for (const e of experts) {
    const last = parts[parts.length - 1];
    if (last && last[1] === e - 1) last[1] = e; else parts.push([e, e]);
  }
  return parts.map(([a, b]) => a === b ? `${a}` : `${a}–${b}`).join(", ");
}

// ---------------------------------------------------------------- totals

function tiles({servers, clients, num_clients}) {
  const pairs = clients.flatMap((client) => client.pairs);
  const waits = pairs.map((pair) => pair.p99_us || 0);
  const failovers = sum(clients, "failovers"), errors = sum(clients, "errors") + sum(servers, "errors");
  const shown = [
    ["rows /s", amount(rate(servers, "rows_per_s"))],
    ["to servers /s", bytes(rate(servers, "bytes_received_per_s"))],
    ["to clients /s", bytes(rate(servers, "bytes_sent_per_s"))],
    ["reply p99", waits.length ? micros(Math.max(...waits)) : "–"],
    ["servers", servers.length], ["clients", num_clients],
    ["retries", sum(clients, "retries"), sum(clients, "retries") ? "warn" : ""],
    ["failovers", failovers, failovers ? "warn" : ""], ["errors", errors, errors ? "bad" : ""],
  ];
  $("tiles").replaceChildren(...shown.map(([name, value, mood]) =>
    make("div", {class: `tile ${mood || ""}`}, make("b", {}, value), make("span", {}, name))));
}

// ---------------------------------------------------------------- flows

function flows({servers, clients}) {
  const width = Math.max(280, $("flows").clientWidth), narrow = width < 520;
  const box = narrow ? 92 : 190, gap = 10;
  const seats = new Map(servers.map((server) => [server.id, server.seat]));
  const order = new Map(servers.map((server, i) => [server.id, i]));
  const links = clients.flatMap((client) => client.pairs.filter((pair) => seats.has(pair.server)).sort(
    (a, b) => order.get(a.server) - order.get(b.server)).map(
    (pair) => ({from: client.id, to: pair.server, pair, rate: pair.bytes_sent_per_s || 0,
                back: pair.bytes_received_per_s || 0})));
  if (!clients.length || !servers.length) {
    $("flows").replaceChildren(make("p", {class: "empty"}, "No client is connected to a server."));
    return;
  }
  const most = Math.max(1, ...side(links, "from"), ...side(links, "to"));
  const scale = 56 / most;
  const left = place(clients.map((c) => c.id), links, "from", scale, gap);
  const right = place(servers.map((s) => s.id), links, "to", scale, gap);
  const height = Math.max(left.height, right.height);
  left.shift((height - left.height) / 2);
  right.shift((height - right.height) / 2);
  const svg = draw("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img",
                           "aria-label": `${links.length} connections of clients and servers`});
  for (const link of links) {  // in the order of both sides, so that few ribbons cross
    const thick = Math.max(1, (link.rate + link.back) * scale);
    const y0 = left.take(link.from, thick), y1 = right.take(link.to, thick);
    const middle = width / 2;
    const path = draw("path", {
      class: "ribbon", d: `M${box} ${y0} C${middle} ${y0} ${middle} ${y1} ${width - box} ${y1}`,
      "stroke-width": thick, style: {stroke: color(seats.get(link.to))},
    });
    path.append(draw("title", {}, `${link.from} → ${link.to}: ${bytes(link.rate)}/s, back ` +
      `${bytes(link.back)}/s; reply p50 ${micros(link.pair.p50_us)}, p99 ${micros(link.pair.p99_us)}`));
    svg.append(path);
  }
  const total = (id, end) => links.filter((link) => link[end] === id).reduce((t, l) => t + l.rate + l.back, 0);
  for (const client of clients) svg.append(...node(client.id, left.at(client.id), 0, box, total(client.id, "from")));
  for (const server of servers) {
    svg.append(...node(server.id, right.at(server.id), width - box, box, total(server.id, "to"), server.seat));
  }
  $("flows").replaceChildren(svg);
}
function side(links, end) {
  const totals = new Map();
  for (const link of links) totals.set(link[end], (totals.get(link[end]) || 0) + link.rate + link.back);
  return totals.values();
}
function place(ids, links, end, scale, gap) {
  const spots = new Map();
  let y = 0;
  for (const id of ids) {
    const total = links.filter((link) => link[end] === id).reduce(
      (t, link) => t + Math.max(1, (link.rate + link.back) * scale), 0);
    const height = Math.max(42, total + 8);
    spots.set(id, {y, height, next: y + (height - total) / 2});
    y += height + gap;
  }
  return {
    height: y - gap, at: (id) => spots.get(id),
    shift: (by) => { for (const spot of spots.values()) { spot.y += by; spot.next += by; } },
    take: (id, thick) => { const spot = spots.get(id); spot.next += thick; return spot.next - thick / 2; },
  };
}
function node(id, spot, x, width, rate, seat) {
  const middle = spot.y + spot.height / 2, room = Math.floor((width - 18) / 7.3);
  const name = id.length > room ? `${id.slice(0, room - 5)}…${id.slice(-4)}` : id;
  const parts = [
    draw("rect", {class: "node", x, y: spot.y, width, height: spot.height, rx: 8}),
    draw("text", {x: x + 10, y: middle - 3}, name),
    draw("text", {class: "quiet", x: x + 10, y: middle + 14}, `${bytes(rate)}/s`),
  ];
  if (seat !== undefined) {
    parts.push(draw("rect", {x: x + width - 5, y: spot.y + 6, width: 5, height: spot.height - 12, rx: 2,
                             style: {fill: color(seat)}}));
  }
  parts[0].append(draw("title", {}, id));
  return parts;
}

// ---------------------------------------------------------------- heat map

function measure(server, experts, counts) {
  const known = heat.get(server.id);
  const same = known && known.counts.length === counts.length && `${known.experts}` === `${experts}`;
  if (same && server.at_s === known.at) return known;
  const state = {at: server.at_s, counts, experts, rates: null};
  if (same && server.at_s > known.at) {
    const seconds = server.at_s - known.at;
    state.rates = counts.map((row, l) => row.map((count, e) => {
      const rate = Math.max(0, count - known.counts[l][e]) / seconds;
      return known.rates ? 0.5 * known.rates[l][e] + 0.5 * rate : rate;
    }));
  }
  heat.set(server.id, state);
  return state;
}
function heatMap({servers, num_experts}) {
  const byLayer = servers.length > 0 && servers.every((s) => s.layer_rows.length || !s.expert_rows.length);
  const states = servers.map((s) => [s, byLayer ? measure(s, s.layer_experts, s.layer_rows)
                                                : measure(s, s.row_experts, [s.expert_rows])]);
  for (const id of heat.keys()) if (!servers.some((s) => s.id === id)) heat.delete(id);
  const live = states.some(([, state]) => state.rates);
  const layers = Math.max(0, ...states.map(([, state]) => state.counts.length));
  const grid = Array.from({length: layers}, () => new Float64Array(num_experts));
  const holders = Array.from({length: num_experts}, () => []);
  for (const [server, {experts, counts, rates}] of states) {
    const values = live ? rates : counts;
    for (const expert of server.experts) if (holders[expert]) holders[expert].push(server);
    experts.forEach((expert, e) => {
      if (values) values.forEach((row, l) => { if (e < row.length && expert < num_experts) grid[l][expert] += row[e]; });
    });
  }
  cells = {grid, holders, layers, byLayer, num: num_experts, live};
  paintHeat();
}
function paintHeat() {
  const {grid, holders, layers, byLayer, num, live} = cells, canvas = $("heat");
  $("heat-note").textContent = layers ? `Rows ${live ? "per second" : "since the servers' start"} by ` +
    `${byLayer ? "layer (down) and expert (across)" : "expert, over all layers"}; the strip below says who holds it.` :
    num ? "No server has reported rows yet." : "No server yet: the rows of each expert will be here.";
  $("heat-legend").hidden = !layers || !num;
  if (!layers || !num) { canvas.width = canvas.height = 0; $("ramp-most").textContent = "";
    canvas.setAttribute("aria-label", "nothing yet"); return; }
  const style = getComputedStyle(document.documentElement), ratio = window.devicePixelRatio || 1;
  const ramp = style.getPropertyValue("--ramp").split(",").map(rgb);
  const label = 34, cell = Math.max(6, Math.min(52, Math.floor(($("heat-scroll").clientWidth - label) / num)));
  const high = Math.max(10, Math.min(22, Math.floor(420 / layers))), gap = cell > 8 ? 1 : 0;
  const strip = 8, width = label + num * cell, height = layers * high + strip + 26;
  canvas.width = width * ratio; canvas.height = height * ratio;
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d");
  paint.scale(ratio, ratio);
  paint.font = "11px system-ui, DejaVu Sans, sans-serif";
  const most = Math.max(0, ...grid.map((row) => Math.max(...row)));
  grid.forEach((row, l) => row.forEach((value, e) => {
    paint.fillStyle = mix(ramp, most ? value / most : 0);
    paint.fillRect(label + e * cell, l * high, cell - gap, high - gap);
  }));
  paint.fillStyle = style.getPropertyValue("--quiet");
  paint.textAlign = "right"; paint.textBaseline = "middle";
  const every = Math.ceil(14 / high);
  for (let l = 0; l < layers; l += every) paint.fillText(byLayer ? l : "all", label - 8, l * high + high / 2);
  paint.textAlign = "center"; paint.textBaseline = "top";
  const step = Math.ceil(26 / cell);
  for (let e = 0; e < num; e += step) paint.fillText(e, label + e * cell + cell / 2, layers * high + strip + 8);
  holders.forEach((list, e) => list.forEach((server, i) => {
    paint.fillStyle = style.getPropertyValue(`--s${server.seat % COLORS}`);
    const part = strip / list.length;
    paint.fillRect(label + e * cell, layers * high + 3 + i * part, cell - gap, Math.max(1, part - 1));
  }));
  Object.assign(cells, {label, cell, high});
  $("ramp-most").textContent = `${amount(most)}${live ? " rows/s" : " rows"}`;
  const bar = $("ramp").getContext("2d");
  for (let x = 0; x < 160; x += 1) { bar.fillStyle = mix(ramp, x / 159); bar.fillRect(x, 0, 1, 10); }
  canvas.setAttribute("aria-label", `Busiest: ${busiest().join("; ") || "nothing yet"}`);
}
function rgb(text) {
  const value = parseInt(text.trim().slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}
function mix(ramp, share) {
  const at = Math.min(0.9999, Math.sqrt(Math.max(0, share))) * (ramp.length - 1), i = Math.floor(at);
  return `rgb(${ramp[i].map((c, k) => Math.round(c + (ramp[i + 1][k] - c) * (at - i))).join(",")})`;
}
function describe(l, e) {
  const who = cells.holders[e].map((server) => server.id).join(", ") || "nobody";
  return `${cells.byLayer ? `layer ${l}, ` : ""}expert ${e}: ${amount(cells.grid[l][e])} rows` +
    `${cells.live ? "/s" : ""}, held by ${who}`;
}
function busiest() {
  const found = cells.grid.flatMap((row, l) => [...row].map((value, e) => [value, l, e]));
  return found.filter(([value]) => value > 0).sort((a, b) => b[0] - a[0]).slice(0, 3).map(([, l, e]) => describe(l, e));
}
$("heat").addEventListener("pointermove", (event) => {
  if (!cells || !cells.cell) return;
  const e = Math.floor((event.offsetX - cells.label) / cells.cell), l = Math.floor(event.offsetY / cells.high);
  $("heat-at").textContent = l >= 0 && l < cells.layers && e >= 0 && e < cells.num ? describe(l, e) : "";
});
$("heat").addEventListener("pointerleave", () => { $("heat-at").textContent = ""; });

// ---------------------------------------------------------------- stages, clients, servers

function stages({servers, clients}) {
  const groups = [["client", clients], ["server", servers]].map(([name, list]) => {
    const found = new Map();
    for (const {stage, p50_us, p99_us} of list.flatMap((item) => item.stages)) {
      if (!found.has(stage)) found.set(stage, {p50: [], p99: []});
      found.get(stage).p50.push(p50_us || 0);
      found.get(stage).p99.push(p99_us || 0);
    }
    const rows = [...found].map(([stage, {p50, p99}]) =>
      bar(stage, p50.sort((a, b) => a - b)[p50.length >> 1], Math.max(...p99)));
    return rows.length ? [make("div", {class: "group"}, name), ...rows] : [];
  });
  const shown = groups.flat();
  $("stages").replaceChildren(...(shown.length ? shown : [make("p", {class: "empty"}, "Nothing was sent yet.")]));
}
function bar(stage, p50, p99) {
  const at = (us) => 100 * Math.max(0, Math.min(1, Math.log10(Math.max(us, 1)) / 6));  // 1 µs to 1 s
  return make("div", {class: "stage"}, make("span", {}, stage),
    make("div", {class: "track"}, make("i", {style: {width: `${at(p50)}%`}}),
      make("u", {style: {left: `calc(${at(p99)}% - 1px)`}})),
    make("span", {class: "times"}, `${micros(p50)} / ${micros(p99)}`));
}
function clientList({clients}) {
  const shown = clients.map((client) => make("div", {class: "client"}, make("b", {}, client.id),
    make("span", {}, `${amount(client.rows_per_s)} rows/s`),
    make("span", {}, `${speed(client.bytes_sent_per_s)} out`),
    make("span", {}, `${speed(client.bytes_received_per_s)} in`),
    make("span", {}, `queue ${client.queue_depth ?? "–"}`),
    ...[["retries", client.retries], ["failovers", client.failovers], ["dropped", client.dropped],
        ["errors", client.errors]].filter(([, count]) => count).map(([name, count]) =>
      make("span", {class: "bad"}, `${count} ${name}`))));
  $("clients").replaceChildren(...(shown.length ? shown : [make("p", {class: "empty"}, "No client has reported yet.")]));
}
function serverList({servers}) {
  if (!servers.length) {
    $("servers").replaceChildren(make("p", {class: "empty"}, "No server yet. Start one: ",
      make("code", {}, "expertwire serve MODEL --experts 0-7")));
    return;
  }
  $("servers").replaceChildren(...servers.map((server) => {
    const [mood, words] = server.draining ? ["warn", "leaving"] :
      server.silent_s > 3 ? ["bad", `silent for ${duration(server.silent_s)}`] : ["", `seat ${server.seat}`];
    const experts = server.stages.find((times) => times.stage === "experts") || {};
    const facts = [
      ["rows/s", amount(server.rows_per_s)], ["in", speed(server.bytes_received_per_s)],
      ["out", speed(server.bytes_sent_per_s)], ["queue", server.queue_depth ?? "–"],
      ["experts p50", micros(experts.p50_us)], ["p99", micros(experts.p99_us)],
      ["clients", server.clients ?? "–"], ["refused", server.refused ?? "–"], ["reports", server.reports],
    ];
    return make("article", {class: "card server"},
      make("h3", {}, make("i", {style: {background: color(server.seat)}}), server.id, make("em", {class: mood}, words)),
      make("p", {}, `experts ${ranges(server.experts) || "none"}`), spark(server),
      make("dl", {}, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))));
  }));
}
function spark(server) {
  const values = history.get(server.id) || {at: null, list: []};
  if (server.at_s !== values.at && server.rows_per_s !== null) {
    values.list = [...values.list, server.rows_per_s].slice(-HISTORY);
    values.at = server.at_s;
    history.set(server.id, values);
  }
  const most = Math.max(1, ...values.list), n = values.list.length;
  const points = values.list.map((v, i) => `${(i + HISTORY - n) * (100 / (HISTORY - 1))},${38 - 34 * v / most}`);
  const svg = draw("svg", {viewBox: "0 0 100 40", preserveAspectRatio: "none", "aria-hidden": "true"});
  if (n > 1) {
    const first = (HISTORY - n) * (100 / (HISTORY - 1));
    svg.append(draw("polygon", {class: "area", points: `${first},40 ${points.join(" ")} 100,40`, style: {fill: color(server.seat)}}),
      draw("polyline", {class: "spark", points: points.join(" "), style: {stroke: color(server.seat)}}));
  }
  return svg;
}

// ---------------------------------------------------------------- once a second

let last = null;
function show(picture) {
  last = picture;
  $("model").textContent = picture.model ? `${picture.model} · ${picture.num_experts} experts` : "no model yet";
  $("state").textContent = `epoch ${picture.epoch} · up ${duration(picture.uptime_s)}`;
  document.body.classList.remove("away");
  for (const part of [tiles, flows, heatMap, stages, clientList, serverList]) part(picture);
}
async function look() {
  try {
    const answer = await fetch("/picture.json", {signal: AbortSignal.timeout(5000)});
    if (!answer.ok) throw new Error(`${answer.status}`);
    show(await answer.json());
    document.body.dataset.looks = Number(document.body.dataset.looks || 0) + 1;
  } catch (error) {
    document.body.classList.add("away");
    $("state").textContent = "the registry does not answer; trying again";
    console.warn(error);
  }
  setTimeout(look, SECONDS * 1000);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => last && show(last));
window.addEventListener("resize", () => last && (flows(last), paintHeat()));
look();
