// Puts the page together.

const data = decode(JSON.parse(byId('data').textContent));
const {runs} = data;
const several = runs.length > 1;

// The parts of a step, as the report splits it.
const PARTS = [
  {label: 'compute', short: 'compute', color: 'var(--compute)', of: (r) => r.compute},
  {label: 'optimizer compute', color: 'var(--optimizer)', of: (r) => r.optimizerCompute},
  ...PURPOSES.map((purpose, p) => ({
    label: `exposed ${purpose} communication`, color: `var(--${CATEGORIES[FIRST_PURPOSE + p].key})`,
    of: (r) => r.exposed[p],
  })),
  {label: 'idle', color: 'var(--idle)', of: (r) => r.idle},
];

const sum = (values) => values.reduce((total, value) => total + value, 0);
const total = (report) => sum(PARTS.map((part) => part.of(report)));

function purposeName(purpose) {
  const swatch = element('span', {class: 'swatch', 'aria-hidden': 'true'});
  swatch.style.setProperty('--color', `var(--${CATEGORIES[FIRST_PURPOSE + purpose].key})`);
  return element('span', {class: 'name'}, swatch, PURPOSES[purpose]);
}

// columns: names; those in `words` are text, the others figures. rows: arrays of strings or nodes,
// an undefined cell being covered by one above it. Narrow screens show a row as a card if `cards`.
function table(label, columns, rows, {words = [0], cards = false} = {}) {
  const isText = (column) => words.includes(column);
  const head = element('tr');
  columns.forEach((column, c) => {
    head.append(element('th', {scope: 'col', class: isText(c) ? null : 'figure'}, column));
  });
  const body = element('tbody');
  for (const row of rows) {
    const line = element('tr', {class: row.className});
    row.forEach((cell, c) => {
      line.append(element(c === 0 ? 'th' : 'td', {
        scope: c === 0 ? 'row' : null, class: isText(c) ? null : 'figure', 'data-label': columns[c],
      }, cell));
    });
    body.append(line);
  }
  return element('div', {
    class: 'scroll', tabindex: '0', role: 'region', 'aria-label': label,
  }, element('table', {class: cards ? 'cards' : null}, element('thead', {}, head), body));
}

function runHeading(run, ...more) {
  return element('div', {class: 'run-heading'}, element('h3', {}, run.label), ...more);
}

// The names of flags whose values are not the same in all runs.
function differingFlags() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.flags)))].sort();
  // Where a run's files lie says nothing about the run.
  const folders = ['run_dir', 'trace'];
  return names.filter((name) => !folders.includes(name) &&
                      runs.some((run) => run.flags[name] !== runs[0].flags[name]));
}

function showHeader() {
  const first = runs[0];
  const title = several ? `${runs.length} traced runs` : `Trace of ${first.label}`;
  document.title = several ? runs.map((run) => run.label).join(', ') : title;
  byId('title').textContent = title;
  const words = new Set(runs.map(({report, worldSize, parameters}) => [
    report.steps === 1 ? `step ${report.firstStep}` :
                         `steps ${report.firstStep} to ${report.lastStep}`,
    worldSize === 1 ? '1 rank' : `${worldSize} ranks`,
    ...(parameters > 0 ? [`${countText(parameters)} parameters`] : []),
  ].join(', ')));
  byId('subtitle').textContent = [...words].join('; ');

  const notices = [];
  for (const run of runs) {
    const name = several ? `${run.label}: ` : '';
    if (run.shownSteps < run.report.steps) {
      notices.push(`${name}timeline and memory show the first ${run.shownSteps} of ` +
          `${run.report.steps} traced steps; the sums are of all.`);
    }
    if (run.cutShort) notices.push(`${name}the trace was cut short: later steps are missing.`);
  }
  byId('notices').append(...notices.map((text) => element('p', {class: 'notice'}, text)));
}

function showSummary() {
  const differing = several ? differingFlags() : [];
  for (const run of runs) {
    const {mean} = run.report;
    const whole = total(mean);
    const measure = (value, label, key) => element('div', {'data-measure': key},
        element('dt', {}, label), element('dd', {}, value));
    const measures = element('dl', {class: 'measures'},
        measure(`${digits(mean.step)} ms`, 'a step', 'step'),
        measure(percent(mean.compute / whole), 'compute', 'compute'),
        measure(percent(sum(mean.exposed) / whole), 'exposed communication', 'exposed'));
    PURPOSES.forEach((purpose, p) => {
      const overlap = mean.overlap[p];
      // Control messages count only where they are seen.
      if (p === CONTROL) return;
      measures.append(measure(
          overlap.communication > 0 ? percent(overlap.hidden / overlap.communication) : 'none',
          overlap.communication > 0 ? `hidden ${purpose} communication` :
              `${purpose} communication`,
          `hidden-${purpose}`));
    });
    // What a person chose; the long tail stands in the table of flags.
    const chosen = ['optimizer', 'matrix_lr', 'lr', 'muon_schedule', 'link', 'model', 'ranks'];
    const shown = [...differing].sort((a, b) => rankOf(chosen, a) - rankOf(chosen, b)).slice(0, 4);
    const chips = element('ul', {class: 'chips', 'aria-label': 'Flags that differ'});
    for (const name of shown) {
      chips.append(element('li', {}, `${name}=${run.flags[name] ?? '(none)'}`));
    }
    if (differing.length > shown.length) {
      const more = `${differing.length - shown.length} more below`;
      chips.append(element('li', {class: 'more'}, element('a', {href: '#flags'}, more)));
    }
    byId('summary').append(element('article', {class: 'run'},
        element('div', {}, element('h2', {}, run.label), differing.length > 0 ? chips : null),
        measures));
  }
}

const rankOf = (list, name) => (list.includes(name) ? list.indexOf(name) : list.length);

function showSplit() {
  const used = PARTS.filter((part) =>
    runs.some((run) => run.report.ranks.some((rank) => part.of(rank) > 0)));
  const legend = byId('split-legend');
  for (const part of used) {
    legend.append(legendItem(part.color, part.label, part.label === 'idle' ? 'outlined' : ''));
  }
  const longest = Math.max(...runs.flatMap((run) => run.report.ranks.map(total)));
  // The axis ends where the longest bar does.
  const bars = byId('split-bars');
  for (const run of runs) {
    bars.append(several ? runHeading(run) : '');
    for (const rank of run.report.ranks) {
      const whole = total(rank);
      const bar = element('div', {
        class: 'bar', role: 'img', 'data-rank': rank.rank, 'data-total': whole,
        'aria-label': `rank ${rank.rank}: ` +
            used.map((part) => `${part.label} ${digits(part.of(rank))} ms`).join(', '),
      });
      for (const part of used) {
        const value = part.of(rank);
        if (!(value > 0)) continue;
        const segment = element('div', {
          class: 'segment', 'data-part': part.label, 'data-ms': value,
        }, element('span', {}, percent(value / whole)),
            element('span', {class: 'ms'}, `${digits(value)} ms`));
        segment.style.width = `${100 * value / longest}%`;
        segment.style.setProperty('--color', part.color);
        const key = /--[\w-]+/.exec(part.color)[0];
        segment.style.color = `var(--on${key.slice(1)})`;
        segment.addEventListener('pointermove', (event) => {
          tip.show(part.label, [
            ['time', `${digits(value)} ms a step`], ['share', percent(value / whole)],
          ], event.clientX, event.clientY);
        });
        segment.addEventListener('pointerleave', () => tip.hide());
        bar.append(segment);
      }
      bars.append(element('div', {class: 'bar-row'},
          element('span', {class: 'bar-name'}, `rank ${rank.rank}`), bar,
          element('span', {class: 'bar-total'}, `${digits(whole)} ms`)));
    }
  }
  const axis = element('div', {class: 'axis', 'aria-hidden': 'true'});
  for (const value of ticks(0, longest * 1.0001, tickStep(longest, 6))) {
    const mark = element('span', {}, `${Number(value.toPrecision(6))} ms`);
    mark.style.left = `${100 * value / longest}%`;
    axis.append(mark);
  }
  bars.append(element('div', {class: 'bar-row'}, element('span'), axis, element('span')));

  const rows = [];
  for (const run of runs) {
    const line = (name, report) => [
      ...(several ? [run.label] : []), name, digits(total(report)),
      ...used.map((part) => element('span', {}, `${digits(part.of(report))} `,
          element('span', {class: 'note'}, percent(part.of(report) / total(report))))),
    ];
    for (const rank of run.report.ranks) rows.push(line(`rank ${rank.rank}`, rank));
    if (run.report.ranks.length > 1) rows.push(line('mean', run.report.mean));
  }
  byId('split-table').append(table('Where a step went, ms', [
    ...(several ? ['run'] : []), 'rank', 'step, ms', ...used.map((part) => part.label),
  ], rows, {words: several ? [0, 1] : [0]}));
}

function fullRange() {
  let begin = 0, end = 1;
  for (const rank of runs.flatMap((run) => run.ranks)) {
    for (const step of rank.steps) end = Math.max(end, step.end);
    for (const stream of rank.streams) {
      if (stream.count === 0) continue;
      begin = Math.min(begin, stream.begin[0]);
      end = Math.max(end, stream.end[stream.count - 1]);
    }
  }
  return [begin, end];
}

function showTimelines(view) {
  const seen = new Set();
  let waits = false, collectives = false;
  for (const stream of runs.flatMap((run) => run.ranks).flatMap((rank) => rank.streams)) {
    for (const op of new Set(stream.op)) {
      seen.add(op.category);
      collectives = collectives || op.collective !== null;
    }
    waits = waits || stream.waits.count > 0;
  }
  const legend = byId('timeline-legend');
  CATEGORIES.forEach(({key, label}, c) => {
    if (seen.has(c)) legend.append(legendItem(`var(--${key})`, label));
  });
  if (collectives) {
    legend.append(legendItem('var(--muted)', 'paler: waiting for other ranks', 'pale'));
  }
  if (waits) legend.append(legendItem('var(--hatch)', 'waiting for another stream', 'hatched'));

  return runs.map((run) => {
    const streams = sum(run.ranks.map((rank) => rank.streams.length));
    const timeline = new Timeline(view, run,
        `Timeline of ${run.label}: ${streams} streams of ${run.ranks.length} ranks`);
    timeline.node.dataset.rows = timeline.rows.length;
    byId('timeline-runs').append(element('div', {class: 'chart'},
        several ? runHeading(run) : '', timeline.node));
    return timeline;
  });
}

function wireToolbar(view) {
  const press = (id, action) => byId(id).addEventListener('click', action);
  press('zoom-in', () => view.zoom(1.5));
  press('zoom-out', () => view.zoom(1 / 1.5));
  press('pan-left', () => view.pan(-view.span / 5));
  press('pan-right', () => view.pan(view.span / 5));
  press('reset', () => view.reset());
  const show = () => {
    const inMs = (time) => {
      const decimals = Math.max(0, Math.min(3, Math.ceil(Math.log10(2e5 / view.span))));
      return (time / 1e3).toFixed(decimals);
    };
    byId('range').textContent = `${inMs(view.begin)} to ${inMs(view.end)} ms`;
  };
  view.listeners.push(show);
  show();
}

function showOverlap() {
  const rows = [];
  PURPOSES.forEach((purpose, p) => {
    const users = runs.filter((run) => run.report.mean.overlap[p].calls > 0);
    if (users.length === 0) return;
    runs.forEach((run, r) => {
      const overlap = run.report.mean.overlap[p];
      const used = overlap.calls > 0;
      const hidden = overlap.hidden / overlap.communication;
      const row = [
        purposeName(p), ...(several ? [run.label] : []),
        used ? digits(overlap.communication) : 'none',
        used ? meter(hidden, p) : '', used ? digits(overlap.communication - overlap.hidden) : '',
        used ? digits(overlap.waiting) : '', used ? digits(overlap.bytes / 2 ** 20) : '',
        used ? digits(overlap.bandwidth) : '', used ? digits(overlap.calls) : '',
      ];
      row.className = r === 0 ? 'group' : null;
      rows.push(row);
    });
  });
  if (rows.length === 0) {
    byId('overlap-table').append(element('p', {}, 'No rank communicated.'));
    return;
  }
  byId('overlap-table').append(table('Communication by purpose', [
    'purpose', ...(several ? ['run'] : []), 'ms', 'hidden', 'exposed, ms', 'waiting, ms',
    'MiB sent', 'GB/s', 'calls',
  ], rows, {words: several ? [0, 1] : [0]}));
}

function meter(fraction, purpose) {
  const fill = element('span');
  fill.style.width = `${Math.max(0, Math.min(100, 100 * fraction)) || 0}%`;
  fill.style.background = `var(--${CATEGORIES[FIRST_PURPOSE + purpose].key})`;
  return element('span', {class: 'meter'},
      element('span', {class: 'track', 'aria-hidden': 'true'}, fill),
      element('span', {class: 'share'}, percent(fraction)));
}

function showExposed() {
  for (const run of runs) {
    const {report} = run;
    const box = byId('exposed-tables');
    if (several) box.append(runHeading(run));
    if (report.mostExposed.length === 0) {
      box.append(element('p', {}, 'No collective was exposed.'));
    } else {
      box.append(table(`Most exposed collectives of ${run.label}`,
          ['op', 'purpose', 'phase', 'rank', 'exposed, ms', 'lasts, ms', 'why'],
          report.mostExposed.map((op) => [
            op.unit && !op.name.includes(op.unit) ? `${op.name} (${op.unit})` : op.name,
            purposeName(op.purpose), op.phase || '–', String(op.rank), digits(op.exposed),
            digits(op.duration), op.reason,
          ]), {words: [0, 1, 2, 6], cards: true}));
    }
    if (report.ranks.length > 1) {
      box.append(element('p', {class: 'slowest'}, report.slowestBy > 0 ?
          `Rank ${report.slowestRank} made the others wait the longest: ` +
          `${digits(report.slowestBy)} ms a step, hidden or not; the next one ` +
          `${digits(report.nextSlowestBy)} ms.` :
          'No rank made the others wait.'));
    }
  }
}

function showMemory(view) {
  const ranks = runs.flatMap((run) => run.ranks);
  if (ranks.every((rank) => rank.memory.times.length === 0)) {
    byId('memory').hidden = true;
    return [];
  }
  const most = ranks.flatMap((rank) => rank.memory.totals).reduce((a, b) => Math.max(a, b), 1);
  const names = data.memoryPurposes;
  const peaks = (rank) => {
    const {totals, bytes} = rank.memory;
    const at = totals.reduce((best, value, i) => (value > totals[best] ? i : best), 0);
    return names.map((_, p) => bytes[p][at] ?? 0);
  };
  names.forEach((name, p) => {
    if (ranks.some((rank) => rank.memory.bytes[p].some((value) => value > 0))) {
      byId('memory-legend').append(legendItem(`var(--memory-${p % MEMORY_COLORS})`, name));
    }
  });
  byId('memory-table').append(table('Memory when a rank held the most', [
    ...(several ? ['run'] : []), 'rank', 'peak', ...names,
  ], runs.flatMap((run) => run.ranks.map((rank) => [
    ...(several ? [run.label] : []), `rank ${rank.rank}`, bytesText(sum(peaks(rank))),
    ...peaks(rank).map(bytesText),
  ])), {words: several ? [0, 1] : [0]}));

  return runs.map((run) => {
    const chart = new MemoryChart(view, run, most, names, `Memory of ${run.label} over time`);
    const choice = element('select', {'aria-label': `Rank of ${run.label} whose memory is shown`});
    run.ranks.forEach((rank, r) => {
      choice.append(element('option', {value: r}, `rank ${rank.rank}`));
    });
    const peak = element('span', {class: 'note'});
    const show = () => {
      chart.show(run.ranks[choice.value]);
      peak.textContent = `most: ${bytesText(sum(peaks(run.ranks[choice.value])))}`;
    };
    choice.addEventListener('change', show);
    byId('memory-runs').append(element('div', {class: 'chart'},
        element('div', {class: 'run-heading'}, several ? element('h3', {}, run.label) : null,
            run.ranks.length > 1 ? choice : null, peak),
        chart.node));
    show();
    return chart;
  });
}

// The loss of whole runs over steps, as lines of their own colour and dash.
const DASHES = ['', '7 3', '2 3', '9 3 2 3', '4 2'];
const SVG = 'http://www.w3.org/2000/svg';

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function curvePoints(curve) {
  const points = [];
  curve.steps.forEach((step, i) => {
    const value = curve.values[i];
    // The difference of two larger ones need not be a number.
    points.push(Number.isFinite(value) && Math.abs(value) < 1e300 ? [step, value] : null);
  });
  return points;
}

function showLoss() {
  const curves = runs.map((run) => ({
    run, points: curvePoints(run.losses), validation: curvePoints(run.validationLosses),
  }));
  const known = curves.flatMap(({points, validation}) => points.concat(validation)).filter(Boolean);
  if (known.length === 0) return () => {};
  byId('loss').hidden = false;
  curves.forEach(({run, points, validation}, r) => {
    const line = svg('svg', {class: 'line-swatch', viewBox: '0 0 30 10', 'aria-hidden': 'true'},
        svg('path', {
          d: 'M1 5H29', class: `curve curve-${r % 5}`, 'stroke-dasharray': DASHES[r % 5],
        }));
    const last = points.filter(Boolean).pop(), lastValidation = validation.filter(Boolean).pop();
    const figures = [
      last && `${last[1].toFixed(4)} at step ${last[0]}`,
      lastValidation && `validation ${lastValidation[1].toFixed(4)}`,
    ].filter(Boolean).join(', ');
    byId('loss-legend').append(element('li', {}, line, `${run.label} `,
        element('span', {class: 'note'}, figures)));
  });
  const every = Math.max(...runs.map((run) => run.losses.every));
  byId('loss-note').textContent = 'Mean training loss of each step, in nat a token' +
      (curves.some(({validation}) => validation.length > 0) ? '; circles: validation' : '') +
      (every > 1 ? `; every ${every}th step is drawn.` : '.');

  const xs = known.map(([x]) => x), ys = known.map(([, y]) => y);
  const extreme = (values, pick) => values.reduce((a, b) => pick(a, b));
  const first = extreme(xs, Math.min), last = extreme(xs, Math.max);
  const steps = Math.max(last - first, 1);
  const top = extreme(ys, Math.max), low = extreme(ys, Math.min);
  // At least what tells numbers of that size apart.
  const size = Math.max(Math.abs(top), Math.abs(low));
  const yStep = tickStep(Math.max(top - low, 1e-6, 1e-9 * size), 5);
  const bottomValue = Math.floor(low / yStep) * yStep;
  const topValue = Math.max(Math.ceil(top / yStep) * yStep, bottomValue + yStep);
  return () => {
    const box = byId('loss-chart');
    const width = box.clientWidth, height = width < 640 ? 220 : 280;
    const margin = {left: 46, right: 12, top: 8, bottom: 34};
    const x = (step) =>
      margin.left + (step - first) / steps * (width - margin.left - margin.right);
    const y = (value) => margin.top + (topValue - value) / (topValue - bottomValue) *
        (height - margin.top - margin.bottom);
    const chart = svg('svg', {
      width, height, role: 'img', 'aria-label': 'Loss over steps; the legend has the last values',
    });
    const text = (content, at, anchor) => svg('text', {...at, 'text-anchor': anchor}, content);
    for (const value of ticks(bottomValue, topValue + yStep / 1e3, yStep)) {
      chart.append(
          svg('path', {
            class: 'gridline', d: `M${margin.left} ${y(value)}H${width - margin.right}`,
          }),
          text(String(Number(value.toPrecision(6))), {x: margin.left - 8, y: y(value) + 4}, 'end'));
    }
    const xStep = Math.max(1, tickStep(steps, Math.max(2, Math.floor(width / 110))));
    for (const step of ticks(first, last, xStep)) {
      chart.append(text(String(step), {x: x(step), y: height - 18},
          x(step) > width - 24 ? 'end' : 'middle'));
    }
    const middle = (margin.left + width - margin.right) / 2;
    chart.append(text('step', {x: middle, y: height - 3}, 'middle'));
    curves.forEach(({points, validation}, r) => {
      let path = '', pen = 'M';
      for (const point of points) {
        if (point) path += `${pen}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`;
        pen = point ? 'L' : 'M';
      }
      if (path) {
        chart.append(svg('path', {
          class: `curve curve-${r % 5}`, d: path, 'stroke-dasharray': DASHES[r % 5],
        }));
      }
      for (const point of validation.filter(Boolean)) {
        chart.append(svg('circle', {
          class: `curve curve-${r % 5}`, cx: x(point[0]), cy: y(point[1]), r: 3.5,
        }));
      }
    });
    box.replaceChildren(chart);
  };
}

function showFlags() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.flags)))].sort();
  if (names.length === 0) {
    byId('flags').hidden = true;
    return;
  }
  const differing = new Set(differingFlags());
  names.sort((a, b) => differing.has(b) - differing.has(a) || (a < b ? -1 : 1));
  byId('flags-table').append(table('Flags of the runs', ['flag', ...runs.map((run) => run.label)],
      names.map((name) => {
        const row = [name, ...runs.map((run) => run.flags[name] ?? '–')];
        row.className = differing.has(name) ? 'differs' : null;
        return row;
      }), {words: [0, ...runs.map((_, r) => r + 1)]}));
  if (location.hash === '#flags') byId('flags').firstElementChild.open = true;
  for (const link of document.querySelectorAll('a[href="#flags"]')) {
    link.addEventListener('click', () => { byId('flags').firstElementChild.open = true; });
  }
}

function main() {
  const dark = matchMedia('(prefers-color-scheme: dark)');
  const charts = [];
  const setTheme = (name) => {
    document.documentElement.dataset.theme = name;
    byId('theme').textContent = name === 'dark' ? 'Light' : 'Dark';
    const other = name === 'dark' ? 'light' : 'dark';
    byId('theme').setAttribute('aria-label', `Switch to ${other} colours`);
    theme.read();
    CATEGORIES.forEach(({key}, c) => {
      document.documentElement.style.setProperty(`--on-${key}`, theme.onCategories[c]);
    });
    for (const chart of charts) chart.redraw();
  };
  setTheme(dark.matches ? 'dark' : 'light');
  dark.addEventListener('change', () => setTheme(dark.matches ? 'dark' : 'light'));
  byId('theme').addEventListener('click', () => {
    setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark');
  });

  const view = new View(...fullRange());
  showHeader();
  showSummary();
  showSplit();
  const timelines = showTimelines(view);
  wireToolbar(view);
  showOverlap();
  showExposed();
  charts.push(...timelines, ...showMemory(view));
  const drawLoss = showLoss();
  showFlags();
  if (location.hash === '#picture') {
    // For picture.sh: one step of every run, and how high the page is. The second step, if there is
    // one: the first update of an optimizer may run behind it.
    document.documentElement.classList.add('picture');
    const steps = runs.map((run) => run.ranks[0].steps).map((all) => all[1] ?? all[0]);
    view.set(Math.min(...steps.map((step) => step.begin)), Math.max(...steps.map((step) => step.end)));
  }
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    for (const chart of charts) chart.drawNow();
    drawLoss();
    document.documentElement.dataset.height = document.documentElement.offsetHeight;
  }).observe(document.body);
  addEventListener('scroll', () => tip.hide(), {passive: true});

  // For tests and the curious: what is visible, and where what is drawn.
  window.dim0 = {
    view,
    rows: (run) => timelines[run].rows.map(
        ({rank, stream}) => ({rank: rank.rank, stream: stream.name})),
    // The point, in the window, of a time on a row of a run's timeline.
    point(run, row, time) {
      const timeline = timelines[run], box = timeline.node.getBoundingClientRect();
      return {x: box.left + timeline.x(time), y: box.top + timeline.rows[row].y + ROW / 2};
    },
    timeAt(run, x) {
      return timelines[run].time(x - timelines[run].node.getBoundingClientRect().left);
    },
  };
}

main();
