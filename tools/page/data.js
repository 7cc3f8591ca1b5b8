'use strict';

// The trace data as the charts use it, decoded from what trace_page.cc wrote; and how numbers are
// written. Times are microseconds since the begin of each run's first step.

// What a mark in the timeline is for: the order of every legend and stacked bar.
const CATEGORIES = [
  {key: 'forward', label: 'forward'},
  {key: 'backward', label: 'backward'},
  {key: 'other', label: 'other compute'},
  {key: 'optimizer', label: 'optimizer compute'},
  {key: 'parameter', label: 'parameter communication'},
  {key: 'gradient', label: 'gradient communication'},
  {key: 'optimizer-comm', label: 'optimizer communication'},
  {key: 'control', label: 'control communication'},
];
const [FORWARD, BACKWARD, OTHER, OPTIMIZER, FIRST_PURPOSE] = [0, 1, 2, 3, 4];
const PURPOSES = ['parameter', 'gradient', 'optimizer', 'control'];
const CONTROL = 3;

// Of the C++ OpKind.
const [KIND_COLLECTIVE, KIND_OPTIMIZER] = [1, 2];

function decodeOp(strings, row) {
  const [name, kind, unit, phase, flops, bytes, failed] = row;
  const op = {
    name: strings[name], kind, unit: strings[unit], phase: strings[phase], flops, bytes, failed,
    collective: null,
  };
  if (row.length > 7) {
    const [operation, channel, purpose, dtype, inElements, outElements, sent] = row.slice(7);
    op.collective = {
      operation: strings[operation], channel: strings[channel], purpose, dtype: strings[dtype],
      inElements, outElements, sent,
    };
  }
  if (kind === KIND_COLLECTIVE) {
    op.category = FIRST_PURPOSE + (op.collective ? op.collective.purpose : CONTROL);
  } else if (kind === KIND_OPTIMIZER) {
    op.category = OPTIMIZER;
  } else {
    op.category = op.phase === 'forward' ? FORWARD : op.phase === 'backward' ? BACKWARD : OTHER;
  }
  return op;
}

// Columns by op and by wait: 100 000 small objects would cost more than what is drawn of them.
function decodeStream(strings, ops, raw) {
  const count = raw.ops.length / 4;
  const stream = {
    name: strings[raw.name],
    count,
    op: new Array(count),
    begin: new Float64Array(count),
    end: new Float64Array(count),
    met: new Float64Array(count),  // NaN of what is no collective
    sequence: new Float64Array(count),
    step: new Float64Array(count),
    waits: {
      count: raw.waits.length / 3,
      begin: new Float64Array(raw.waits.length / 3),
      end: new Float64Array(raw.waits.length / 3),
      cause: new Int32Array(raw.waits.length / 3),
    },
  };
  let time = 0, step = 0, collective = 0;
  for (let i = 0; i < count; ++i) {
    const op = ops[raw.ops[4 * i]];
    stream.op[i] = op;
    stream.begin[i] = time += raw.ops[4 * i + 1];
    stream.end[i] = time += raw.ops[4 * i + 2];
    stream.step[i] = step += raw.ops[4 * i + 3];
    stream.met[i] = NaN;
    if (op.collective) {
      stream.met[i] = stream.begin[i] + raw.collectives[collective++];
      stream.sequence[i] = raw.collectives[collective++];
    }
  }
  time = 0;
  for (let i = 0; i < stream.waits.count; ++i) {
    stream.waits.begin[i] = time += raw.waits[3 * i];
    stream.waits.end[i] = time += raw.waits[3 * i + 1];
    stream.waits.cause[i] = raw.waits[3 * i + 2];
  }
  return stream;
}

function decodeMemory(raw, purposes) {
  const times = [], totals = [], bytes = [];  // bytes[purpose] of each time
  for (let p = 0; p < purposes; ++p) bytes.push([]);
  const now = new Array(purposes).fill(0);
  let time = 0;
  for (let i = 0; i < raw.length; i += 3) {
    time += raw[i];
    now[raw[i + 1]] += raw[i + 2];
    if (times.length === 0 || times[times.length - 1] !== time) times.push(time);
    const last = times.length - 1;
    totals[last] = now.reduce((sum, value) => sum + value, 0);
    for (let p = 0; p < purposes; ++p) bytes[p][last] = now[p];
  }
  return {times, totals, bytes};
}

function decodeRank(strings, ops, raw, purposes) {
  const rank = {
    rank: raw.rank,
    streams: raw.streams.map((stream) => decodeStream(strings, ops, stream)),
    steps: [],
    memory: decodeMemory(raw.memory, purposes),
  };
  let time = 0;
  for (let i = 0; i < raw.steps.length; i += 3) {
    const begin = time += raw.steps[i + 1];
    const end = time += raw.steps[i + 2];
    rank.steps.push({step: raw.steps[i], begin, end});
  }
  // The stream and index of the op at a position of the rank: what waits name as their cause.
  rank.opAt = (position) => {
    for (const stream of rank.streams) {
      if (position < stream.count) return {stream, index: position};
      position -= stream.count;
    }
    return null;
  };
  return rank;
}

function decode(raw) {
  const ops = raw.ops.map((row) => decodeOp(raw.strings, row));
  return {
    strings: raw.strings,
    memoryPurposes: raw.memoryPurposes,
    runs: raw.runs.map((run) => ({
      ...run,
      ranks: run.ranks.map(
          (rank) => decodeRank(raw.strings, ops, rank, raw.memoryPurposes.length)),
    })),
  };
}

// The first index whose value is greater than `limit`; values ascend.
function firstAbove(values, limit, count = values.length) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

// Three significant digits, but all of the integer part and no more than three decimals.
function digits(value) {
  if (!Number.isFinite(value)) return '–';
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size < 0.0005) return value < 0 ? '>-0.001' : '<0.001';
  return value.toFixed(size < 0.9995 ? 3 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

function percent(fraction) {
  if (!Number.isFinite(fraction)) return '–';
  const value = 100 * fraction;
  return (value > 0 && value < 9.95 ? value.toFixed(1) : value.toFixed(0)) + ' %';
}

function duration(microseconds) {
  const size = Math.abs(microseconds);
  if (size < 999.5) return `${Math.round(microseconds)} µs`;
  if (size < 999.5e3) return `${digits(microseconds / 1e3)} ms`;
  return `${digits(microseconds / 1e6)} s`;
}

function scaled(value, units, base) {
  let i = 0;
  while (i + 1 < units.length && Math.abs(value) >= 0.9995 * base) {
    value /= base;
    ++i;
  }
  return `${i === 0 ? Math.round(value) : digits(value)} ${units[i]}`;
}

const bytesText = (bytes) => scaled(bytes, ['B', 'KiB', 'MiB', 'GiB', 'TiB'], 1024);
const countText = (value) => scaled(value, ['', 'k', 'M', 'G', 'T', 'P', 'E'], 1000).trim();

// A round number of which at most `most` fit into `span`: 1, 2 or 5 times a power of 10. No number, 0
// or infinite where the span has no length that numbers can divide: ticks() makes nothing of these.
function tickStep(span, most) {
  const power = 10 ** Math.floor(Math.log10(span / most));
  for (const factor of [1, 2, 5]) {
    if (factor * power * most >= span) return factor * power;
  }
  return 10 * power;
}

// The multiples of `step` from `begin` to `end`. Whatever the three are, there is an end to it.
function ticks(begin, end, step) {
  const MOST = 1000;  // more lines than any screen is to show
  const values = [];
  for (let i = Math.ceil(begin / step - 1e-9); i * step <= end && values.length < MOST; ++i) {
    values.push(i * step);
  }
  return values;
}
