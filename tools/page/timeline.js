// One run's streams as rows over time, and its memory over the same time.

const ROW = 19, BAR = 14, RANK_GAP = 21, RULER = 38;

class Timeline extends TimeCanvas {
  constructor(view, run, label) {
    super(view, 0, label);
    this.run = run;
    this.rows = [];
    this.headings = [];  // of ranks
    let y = RULER;
    for (const rank of run.ranks) {
      this.headings.push({text: `rank ${rank.rank}`, y});
      y += RANK_GAP;
      for (const stream of rank.streams) {
        this.rows.push({rank, stream, y});
        y += ROW;
      }
      y += 4;
    }
    this.height = y + 2;
    this.selected = null;  // {row, index, wait}: what the tooltip tells of
  }

  draw(context) {
    const {colors, font} = theme;
    const {gutter, width} = this;
    context.fillStyle = colors.band;
    for (const row of this.rows) context.fillRect(gutter, row.y, width - gutter, ROW - 2);
    this.drawGrid(context, RULER - 4, this.height, 28);

    context.font = `600 11px ${font}`;
    context.fillStyle = colors.ink;
    for (const heading of this.headings) context.fillText(heading.text, 0, heading.y + 11);
    context.font = `11px ${font}`;
    for (const row of this.rows) {
      context.fillStyle = colors.muted;
      this.text(context, row.stream.name, 0, row.y + ROW / 2 - 1, gutter - 8);
    }

    context.save();
    context.beginPath();
    context.rect(gutter, 0, width - gutter, this.height);
    context.clip();
    for (const row of this.rows) {
      this.drawWaits(context, row);
      this.drawOps(context, row);
    }
    const steps = this.run.ranks[0].steps;
    // Not through the figures of the time axis.
    this.drawSteps(context, steps, [[3, 19], [RULER - 4, this.height]]);
    context.fillStyle = colors.ink;
    context.font = `600 11px ${font}`;
    for (const step of steps) {
      const left = Math.max(this.x(step.begin), gutter), right = Math.min(this.x(step.end), width);
      const name = `step ${step.step}`;
      if (context.measureText(name).width + 8 <= right - left) context.fillText(name, left + 5, 11);
    }
    this.drawSelected(context);
    context.restore();
  }

  // What is narrower than a pixel is gathered: a pixel shows the category that fills it most, the
  // paler the less of it is filled.
  drawOps(context, row) {
    const {stream} = row;
    const {view, scale} = this;
    const top = row.y + 1.5;
    const filled = new Float64Array(CATEGORIES.length);
    let pixel = -1;
    const flush = () => {
      if (pixel < 0) return;
      let most = 0, sum = 0;
      for (let c = 0; c < filled.length; ++c) {
        sum += filled[c];
        if (filled[c] > filled[most]) most = c;
      }
      context.globalAlpha = Math.max(0.3, Math.min(1, sum));
      context.fillStyle = theme.categories[most];
      context.fillRect(pixel, top, 1, BAR);
      context.globalAlpha = 1;
      filled.fill(0);
      pixel = -1;
    };
    const labels = [];
    for (let i = firstAbove(stream.end, view.begin); i < stream.count; ++i) {
      if (stream.begin[i] >= view.end) break;
      const left = this.x(stream.begin[i]), right = this.x(stream.end[i]);
      const {category} = stream.op[i];
      if (right - left < 1.5) {
        const at = Math.floor(left);
        if (at !== pixel) flush();
        pixel = at;
        filled[category] += Math.max(right - left, 0.2);
        continue;
      }
      flush();
      const from = Math.max(left, this.gutter - 2), to = Math.min(right, this.width + 2);
      // A hair of the background between neighbours of one colour.
      const gap = right - left > 4 ? 0.6 : 0;
      const met = Math.max(from, Math.min(this.x(stream.met[i]), to));
      context.fillStyle = theme.categories[category];
      if (met > from) {
        context.globalAlpha = 0.38;
        context.fillRect(from, top, met - from, BAR);
        context.globalAlpha = 1;
      }
      const body = met > from ? met : from;
      context.fillRect(body, top, Math.max(to - body - gap, 0.4), BAR);
      if (stream.op[i].failed) {
        context.strokeStyle = theme.colors.ink;
        context.lineWidth = 2;
        context.strokeRect(from + 1, top + 1, to - from - 2, BAR - 2);
      }
      if (to - body > 24) labels.push([stream.op[i], body + 4, to - body - 8]);
    }
    flush();
    context.font = `10.5px ${theme.font}`;
    for (const [op, left, room] of labels) {
      context.fillStyle = theme.onCategories[op.category];
      // A whole unit says more than the begin of a name, which stream and colour tell already.
      const fits = (text) => text !== '' && context.measureText(text).width <= room;
      const text = fits(op.name) || !fits(op.unit) ? op.name : op.unit;
      if (room > 60 || fits(text)) this.text(context, text, left, top + BAR / 2 + 0.5, room);
    }
  }

  // Thin hatched marks: time in which a stream had to wait.
  drawWaits(context, row) {
    const {waits} = row.stream;
    const top = row.y + 6, bottom = row.y + 11;
    context.strokeStyle = theme.colors.hatch;
    context.lineWidth = 1;
    let drawn = -1;
    context.beginPath();
    for (let i = firstAbove(waits.end, this.view.begin); i < waits.count; ++i) {
      if (waits.begin[i] >= this.view.end) break;
      const left = Math.max(this.x(waits.begin[i]), this.gutter - 8);
      const right = Math.min(this.x(waits.end[i]), this.width + 8);
      if (right - left < 1 && Math.floor(right) === drawn) continue;
      drawn = Math.floor(right);
      if (right - left >= 6) {
        // The hatching stands still while the view moves past it only if it starts at the wait.
        for (let x = left + 2; x + 3 <= right; x += 4) {
          context.moveTo(x, bottom);
          context.lineTo(x + 3, top);
        }
      } else {
        context.moveTo(left, (top + bottom) / 2);
        context.lineTo(Math.max(right, left + 0.5), (top + bottom) / 2);
      }
    }
    context.stroke();
  }

  drawSelected(context) {
    if (!this.selected) return;
    const {row, index, wait} = this.selected;
    const marks = wait ? row.stream.waits : row.stream;
    const outline = (at, begin, end) => {
      const left = Math.max(this.x(begin), this.gutter - 4);
      const right = Math.min(this.x(end), this.width + 4);
      context.strokeRect(left - 0.5, at.y + 0.5, Math.max(right - left, 2) + 1, BAR + 2);
    };
    context.strokeStyle = theme.colors.ink;
    context.lineWidth = 1.5;
    outline(row, marks.begin[index], marks.end[index]);
    // And the op that a wait waited for.
    const cause = wait && marks.cause[index] >= 0 ? row.rank.opAt(marks.cause[index]) : null;
    const causeRow = cause && this.rows.find((other) => other.stream === cause.stream);
    if (!causeRow) return;
    context.setLineDash([3, 2]);
    outline(causeRow, cause.stream.begin[cause.index], cause.stream.end[cause.index]);
    context.setLineDash([]);
  }

  // The op, or else the wait, within 3 pixels of a point.
  at(x, y) {
    const row = this.rows.find((each) => y >= each.y && y < each.y + ROW);
    if (!row || x < this.gutter) return null;
    const time = this.time(x), slack = 3 / this.scale;
    let best = null;
    for (const wait of [false, true]) {
      const marks = wait ? row.stream.waits : row.stream;
      for (let i = firstAbove(marks.end, time - slack, marks.count); i < marks.count; ++i) {
        if (marks.begin[i] > time + slack) break;
        const distance = Math.max(0, marks.begin[i] - time, time - marks.end[i]);
        if (!best || distance < best.distance) best = {row, index: i, wait, distance};
        if (distance === 0) break;
      }
      if (best && best.distance === 0) break;
    }
    return best;
  }

  // The begin of what contains `time`, within its step: ["step", "3"] and the like.
  stepLines(rank, step, begin) {
    const within = rank.steps.find((each) => each.step === step);
    const lines = [['step', String(step)]];
    if (within) lines.push(['begin in step', duration(begin - within.begin)]);
    return lines;
  }

  describe({row, index, wait}) {
    const {stream, rank} = row;
    if (wait) return this.describeWait(row, index);
    const op = stream.op[index];
    const begin = stream.begin[index], end = stream.end[index], took = end - begin;
    const lines = [['stream', `${stream.name}, rank ${rank.rank}`]];
    if (op.unit) lines.push(['unit', op.unit]);
    if (op.phase) lines.push(['phase', op.phase]);
    lines.push(...this.stepLines(rank, stream.step[index], begin), ['duration', duration(took)]);
    if (op.failed) lines.push(['result', 'failed']);
    const seconds = took / 1e6;
    if (op.flops > 0) {
      lines.push(['work', `${countText(op.flops)}FLOP`]);
      if (took > 0) lines.push(['speed', `${countText(op.flops / seconds)}FLOP/s`]);
    }
    if (op.collective) {
      const c = op.collective;
      const met = Math.max(begin, Math.min(stream.met[index], end));
      lines.push(['purpose', PURPOSES[c.purpose]]);
      lines.push(['waited for ranks', duration(met - begin)]);
      lines.push(['sent', bytesText(c.sent)]);
      if (end > met && c.sent > 0) {
        lines.push(['while moving', `${digits(c.sent / (end - met) / 1e3)} GB/s`]);
      }
      lines.push(['elements', `${countText(c.inElements)} in, ${countText(c.outElements)} out, ` +
          c.dtype]);
      lines.push(['call', `${c.operation} ${stream.sequence[index]} on ${c.channel}`]);
    } else if (op.bytes > 0) {
      lines.push(['bytes', bytesText(op.bytes)]);
      if (took > 0) lines.push(['bandwidth', `${digits(op.bytes / took / 1e3)} GB/s`]);
    }
    return {title: op.name, lines};
  }

  describeWait(row, index) {
    const {stream, rank} = row, {waits} = stream;
    const begin = waits.begin[index];
    const lines = [['stream', `${stream.name}, rank ${rank.rank}`]];
    const cause = waits.cause[index];
    if (cause >= 0) {
      const {stream: other, index: at} = rank.opAt(cause);
      lines.push(['for', `${other.op[at].name}, on ${other.name}`]);
    } else {
      lines.push(['for', data.strings[-1 - cause] || 'what is not traced']);
    }
    const step = rank.steps.find((each) => begin >= each.begin && begin < each.end);
    if (step) lines.push(...this.stepLines(rank, step.step, begin));
    lines.push(['duration', duration(waits.end[index] - begin)]);
    return {title: 'wait', lines};
  }

  select(found, x, y) {
    this.selected = found;
    this.redraw();
    if (!found) {
      tip.hide();
      return;
    }
    const {title, lines} = this.describe(found);
    tip.show(title, lines, x, y);
  }

  hover(x, y, event) {
    this.select(this.at(x, y), event.clientX, event.clientY);
  }

  leave() {
    this.select(null);
  }

  // Rows and ops by keys, for who has no pointer.
  keys() {
    const step = (rows, ops) => {
      const now = this.selected;
      const at = now ? this.rows.indexOf(now.row) + rows : 0;
      const row = this.rows[Math.max(0, Math.min(at, this.rows.length - 1))];
      const {stream} = row;
      if (stream.count === 0) {
        this.selected = {row, index: 0, wait: false};
        tip.hide();
        return;
      }
      let index;
      if (now && rows === 0 && !now.wait) {
        index = Math.max(0, Math.min(now.index + ops, stream.count - 1));
      } else {
        const from = now && now.row.stream.count > now.index ?
            now.row.stream.begin[now.index] : this.view.begin;
        index = Math.min(firstAbove(stream.end, from), stream.count - 1);
      }
      const middle = (stream.begin[index] + stream.end[index]) / 2;
      if (middle < this.view.begin || middle > this.view.end) {
        this.view.pan(middle - (this.view.begin + this.view.end) / 2);
      }
      const box = this.node.getBoundingClientRect();
      this.select({row, index, wait: false}, box.left + this.x(middle), box.top + row.y + BAR);
    };
    return {
      ArrowUp: () => step(-1, 0), ArrowDown: () => step(1, 0), ',': () => step(0, -1),
      '.': () => step(0, 1),
    };
  }
}

const MEMORY_HEIGHT = 132, MEMORY_TOP = 8, MEMORY_BOTTOM = 22;

class MemoryChart extends TimeCanvas {
  // most: the bytes at the top of the chart, the same for all runs.
  constructor(view, run, most, purposes, label) {
    super(view, MEMORY_HEIGHT, label);
    this.run = run;
    this.most = most;
    this.purposes = purposes;
    this.rank = run.ranks[0];
  }

  show(rank) {
    this.rank = rank;
    this.redraw();
  }

  y(bytes) {
    const room = MEMORY_HEIGHT - MEMORY_TOP - MEMORY_BOTTOM;
    return MEMORY_TOP + room * (1 - bytes / this.most);
  }

  // One sample a pixel at most: the fullest of those in it.
  visible() {
    const {times, totals} = this.rank.memory;
    const picked = [];
    let i = Math.max(0, firstAbove(times, this.view.begin) - 1);
    while (i < times.length && times[i] <= this.view.end) {
      const pixel = Math.floor(this.x(times[i]));
      let fullest = i;
      for (++i; i < times.length && Math.floor(this.x(times[i])) === pixel; ++i) {
        if (totals[i] > totals[fullest]) fullest = i;
      }
      picked.push({sample: fullest, x: Math.max(this.gutter, pixel)});
    }
    return picked;
  }

  draw(context) {
    const {colors, font} = theme;
    const bottom = MEMORY_HEIGHT - MEMORY_BOTTOM;
    this.drawGrid(context, MEMORY_TOP, bottom, MEMORY_HEIGHT - 9);
    context.fillStyle = colors.muted;
    context.strokeStyle = colors.grid;
    context.font = `11px ${font}`;
    context.textAlign = 'right';
    // Powers of two are round in bytes.
    const step = 2 ** Math.ceil(Math.log2(this.most / 4));
    for (const bytes of ticks(0, this.most, step)) {
      const y = Math.round(this.y(bytes)) + 0.5;
      context.fillText(bytesText(bytes), this.gutter - 8, y);
      context.beginPath();
      context.moveTo(this.gutter, y);
      context.lineTo(this.width, y);
      context.stroke();
    }
    context.textAlign = 'left';
    // Until the run's last step; then nothing is known.
    const last = this.rank.steps[this.rank.steps.length - 1].end;
    const right = Math.min(this.width, this.x(last));
    const picked = this.visible().filter(({x}) => x < right);
    const below = new Float64Array(picked.length);
    for (let p = 0; p < this.purposes.length && picked.length > 0; ++p) {
      const bytes = this.rank.memory.bytes[p];
      const above = picked.map(({sample}, i) => below[i] + bytes[sample]);
      context.fillStyle = colors[`memory-${p % MEMORY_COLORS}`];
      context.beginPath();
      const edge = (values, from, to, direction) => {
        for (let i = from; i !== to; i += direction) {
          const [a, b] = [picked[i].x, i + 1 < picked.length ? picked[i + 1].x : right];
          const y = this.y(values[i]);
          context.lineTo(direction > 0 ? a : b, y);
          context.lineTo(direction > 0 ? b : a, y);
        }
      };
      edge(above, 0, picked.length, 1);
      edge(below, picked.length - 1, -1, -1);
      context.fill();
      below.set(above);
    }
    this.drawSteps(context, this.run.ranks[0].steps, [[MEMORY_TOP, bottom]]);
  }

  hover(x, y, event) {
    const {times, totals, bytes} = this.rank.memory;
    const sample = firstAbove(times, this.time(x)) - 1;
    if (x < this.gutter || sample < 0) {
      tip.hide();
      return;
    }
    const lines = [['time', duration(this.time(x))]];
    this.purposes.forEach((purpose, p) => {
      if (bytes[p][sample] !== 0) lines.push([purpose, bytesText(bytes[p][sample])]);
    });
    tip.show(bytesText(totals[sample]), lines, event.clientX, event.clientY);
  }
}
