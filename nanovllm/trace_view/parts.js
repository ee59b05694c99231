// What the pages that show the events of an engine have in common. Nothing is drawn up to the next line of this kind.

function newState(names) {
  const each = value => names.map(value);
  return {status: each(() => "absent"), table: each(() => []), writer: new Map(), tokens: each(() => []), ends: new Map()};
}

function hear(state, e) {
  if (e.type === "token") state.tokens[e.sequence].push(e);
  if (e.type === "finished") state.ends.set(e.sequence, e.reason);
  if (e.status) state.status[e.sequence] = e.status;
  for (const [sequence, [kept, ...added]] of Object.entries(e.tables || {})) {
    state.table[sequence] = [...state.table[sequence].slice(0, kept), ...added];
  }
  for (const block of e.taken || []) state.writer.set(block, e.sequence);
}

function ownersOf(state) {
  const owners = new Map();
  state.table.forEach((table, sequence) => table.forEach(block => {
    if (!owners.has(block)) owners.set(block, []);
    owners.get(block).push(sequence);
  }));
  return owners;
}

// --- drawing ---------------------------------------------------------------------------------------------------------

const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#9a8c00"];

function colour(sequence) {
  return sequence < PALETTE.length ? PALETTE[sequence] : `hsl(${(sequence * 137.5) % 360} 60% 62%)`;
}

function inkOn(sequence) {
  return colour(sequence) === PALETTE[0] ? "#fff" : "#000";  // all but the first are too light for white
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return [pen, width];
}

// Draws n blocks, each in the colour of its owner, and returns where they are. `room` is the height they may take.
function drawBlockMap(canvas, n, state, room) {
  const width = canvas.clientWidth, size = Math.max(6, Math.min(44, Math.floor(Math.sqrt(width * room / n))));
  const columns = Math.max(1, Math.floor(width / size)), [pen] = prepare(canvas, Math.ceil(n / columns) * size);
  const owners = ownersOf(state), inner = size - (size > 12 ? 3 : 1);
  pen.textAlign = "center"; pen.textBaseline = "middle"; pen.font = `${Math.floor(size * .4)}px system-ui, sans-serif`;
  for (let block = 0; block < n; block++) {
    const x = block % columns * size, y = Math.floor(block / columns) * size;
    const held = owners.get(block), last = state.writer.get(block);
    pen.fillStyle = css("--free"); pen.fillRect(x, y, inner, inner);
    if (held) {
      held.forEach((sequence, i) => {  // as many stripes as owners
        pen.fillStyle = colour(sequence);
        pen.fillRect(x, y + i * inner / held.length, inner, inner / held.length);
      });
    } else if (last !== undefined) {
      pen.globalAlpha = .25; pen.fillStyle = colour(last); pen.fillRect(x, y, inner, inner); pen.globalAlpha = 1;
    }
    if (size >= 26) {
      pen.fillStyle = held ? inkOn(held[Math.floor(held.length / 2)]) : css("--dim");
      pen.fillText(String(block), x + inner / 2, y + inner / 2);
    }
  }
  return {size, columns, owners, writer: state.writer};
}
