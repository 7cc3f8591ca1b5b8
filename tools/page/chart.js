// What all charts share: elements, colours of the theme, the tooltip, the visible range of time, a
// canvas that follows its width.

// Strings from traces are data: they only ever become text nodes and attribute values.
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const byId = (id) => document.getElementById(id);

// Colours stand in page.css; a canvas needs their values.
const theme = {
  colors: {},
  read() {
    const style = getComputedStyle(document.documentElement);
    const names = ['ink', 'muted', 'line', 'grid', 'panel', 'band', 'hatch'];
    for (const {key} of CATEGORIES) names.push(key);
    for (let i = 0; i < MEMORY_COLORS; ++i) names.push(`memory-${i}`);
    for (const name of names) this.colors[name] = style.getPropertyValue(`--${name}`).trim();
    this.categories = CATEGORIES.map(({key}) => this.colors[key]);
    this.onCategories = this.categories.map(textColorOn);
    this.font = style.getPropertyValue('--font').trim();
  },
};
const MEMORY_COLORS = 7;

// Black or white, whichever stands out more from "#rrggbb".
function textColorOn(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const value = parseInt(color.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? '#000000' : '#ffffff';
}

function legendItem(color, label, className = '') {
  const swatch = element('span', {class: `swatch ${className}`, 'aria-hidden': 'true'});
  swatch.style.setProperty('--color', color);
  return element('li', {}, swatch, label);
}

const tip = {
  // lines: [label, value] pairs. x, y: where to point, in the window.
  show(title, lines, x, y) {
    const list = element('dl');
    for (const [label, value] of lines) {
      list.append(element('dt', {}, label), element('dd', {}, value));
    }
    const node = byId('tip');
    node.replaceChildren(element('strong', {}, title), list);
    node.hidden = false;
    const {width, height} = node.getBoundingClientRect();
    const room = document.documentElement.clientWidth;
    const left = x + 14 + width <= room - 8 ? x + 14 : x - 14 - width;
    const top = y + 14 + height <= innerHeight - 8 ? y + 14 : y - 14 - height;
    node.style.left = `${Math.max(8, Math.min(left, room - width - 8))}px`;
    node.style.top = `${Math.max(8, top)}px`;
  },
  hide() {
    byId('tip').hidden = true;
  },
};

// The range of time that all timelines and memory charts show.
class View {
  constructor(begin, end) {
    this.full = {begin, end};
    this.begin = begin;
    this.end = end;
    this.listeners = [];
  }

  get span() {
    return this.end - this.begin;
  }

  set(begin, end) {
    const full = this.full.end - this.full.begin;
    const shortest = Math.min(10, full);
    const span = Math.max(shortest, Math.min(end - begin, full));
    // Too long or too short a range keeps its middle; one beyond an end is moved.
    begin += (end - begin - span) / 2;
    this.begin = Math.max(this.full.begin, Math.min(begin, this.full.end - span));
    this.end = this.begin + span;
    for (const listener of this.listeners) listener();
  }

  // factor > 1 shows less time; what is at time `at` stays where it is.
  zoom(factor, at = (this.begin + this.end) / 2) {
    const full = this.full.end - this.full.begin;
    const span = Math.max(Math.min(10, full), Math.min(this.span / factor, full));
    const begin = at - (at - this.begin) * span / this.span;
    this.set(begin, begin + span);
  }

  pan(time) {
    this.set(this.begin + time, this.end + time);
  }

  reset() {
    this.set(this.full.begin, this.full.end);
  }
}

// A canvas over the shared view, as wide as its parent, with a gutter for names at its left.
class TimeCanvas {
  constructor(view, height, label) {
    this.view = view;
    this.height = height;
    this.node = element('canvas', {
      tabindex: '0', role: 'application', 'aria-label': label, 'aria-describedby': 'timeline-help',
    });
    this.context = this.node.getContext('2d');
    this.width = 0;
    this.pending = false;
    this.pointers = new Map();
    view.listeners.push(() => this.redraw());
    this.listen();
  }

  get gutter() {
    return this.width < 640 ? 88 : 132;
  }

  get scale() {  // pixels per microsecond
    return (this.width - this.gutter) / this.view.span;
  }

  x(time) {
    return this.gutter + (time - this.view.begin) * this.scale;
  }

  time(x) {
    return this.view.begin + (x - this.gutter) / this.scale;
  }

  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.drawNow();
    });
  }

  drawNow() {
    const width = this.node.parentElement.clientWidth;
    if (width <= 0) return;
    this.width = width;
    const ratio = window.devicePixelRatio || 1;
    if (this.node.width !== Math.round(width * ratio) ||
        this.node.height !== Math.round(this.height * ratio)) {
      this.node.width = Math.round(width * ratio);
      this.node.height = Math.round(this.height * ratio);
      this.node.style.height = `${this.height}px`;
    }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, this.height);
    this.context.textBaseline = 'middle';
    this.draw(this.context);
  }

  // Text that ends in an ellipsis where it is too long; nothing where not even that fits.
  text(context, text, x, y, room) {
    if (context.measureText(text).width > room) {
      let low = 0, high = text.length;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        const fits = context.measureText(text.slice(0, middle) + '…').width <= room;
        if (fits) low = middle; else high = middle - 1;
      }
      if (low < 2) return;
      text = text.slice(0, low) + '…';
    }
    context.fillText(text, x, y);
  }

  // Vertical lines through [top, bottom] at round times; their figures at y, if it is given.
  drawGrid(context, top, bottom, y = null) {
    const {colors} = theme;
    const room = this.width - this.gutter;
    const step = tickStep(this.view.span, Math.max(2, Math.floor(room / 90)));
    const unit = step >= 1e6 ? [1e6, 's'] : step >= 1e3 ? [1e3, 'ms'] : [1, 'µs'];
    context.fillStyle = colors.muted;
    context.strokeStyle = colors.grid;
    context.lineWidth = 1;
    context.font = `11px ${theme.font}`;
    for (const time of ticks(this.view.begin, this.view.end, step)) {
      const x = Math.round(this.x(time)) + 0.5;
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, bottom);
      context.stroke();
      if (y === null) continue;
      const text = `${Number((time / unit[0]).toFixed(6))} ${unit[1]}`;
      const half = context.measureText(text).width / 2;
      if (x - half < this.gutter - 8) {
        context.textAlign = 'left';
        context.fillText(text, this.gutter, y);
      } else {
        context.textAlign = x + half > this.width ? 'right' : 'center';
        context.fillText(text, x + half > this.width ? this.width : x, y);
      }
    }
    context.textAlign = 'left';
  }

  // Lines at the steps' begins and ends, through each of `parts`: [top, bottom] pairs.
  drawSteps(context, steps, parts) {
    context.strokeStyle = theme.colors.muted;
    context.lineWidth = 1;
    for (const step of steps) {
      for (const time of [step.begin, step.end]) {
        if (time < this.view.begin || time > this.view.end) continue;
        const x = Math.min(Math.round(this.x(time)) + 0.5, this.width - 0.5);
        context.beginPath();
        for (const [top, bottom] of parts) {
          context.moveTo(x, top);
          context.lineTo(x, bottom);
        }
        context.stroke();
      }
    }
  }

  point(event) {
    const box = this.node.getBoundingClientRect();
    return {x: event.clientX - box.left, y: event.clientY - box.top};
  }

  listen() {
    const {node, view} = this;
    node.addEventListener('wheel', (event) => {
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        view.pan((event.deltaX || event.deltaY) / this.scale);
        return;
      }
      // All is shown already: the page scrolls on.
      if (event.deltaY > 0 && view.span >= view.full.end - view.full.begin) return;
      event.preventDefault();
      const pixels = event.deltaY * (event.deltaMode === WheelEvent.DOM_DELTA_PIXEL ? 1 : 30);
      const limited = Math.max(-240, Math.min(pixels, 240));
      view.zoom(2 ** (-limited / 200), this.time(Math.max(this.gutter, this.point(event).x)));
    }, {passive: false});

    node.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return;
      this.pointers.set(event.pointerId, {...this.point(event), start: event.clientX});
      node.setPointerCapture(event.pointerId);
      this.dragged = false;
    });
    node.addEventListener('pointermove', (event) => {
      const before = this.pointers.get(event.pointerId);
      const now = this.point(event);
      if (!before) {
        if (event.pointerType !== 'touch') this.hover(now.x, now.y, event);
        return;
      }
      if (Math.abs(event.clientX - before.start) > 3) this.dragged = true;
      const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
      if (others.length === 1) {
        // What is under each finger stays there: the other one does not move now.
        const other = others[0][1];
        const distance = (point) => Math.max(10, Math.abs(point.x - other.x));
        this.dragged = true;
        view.zoom(distance(now) / distance(before), this.time(other.x));
      } else if (others.length === 0 && this.dragged) {
        tip.hide();
        view.pan((before.x - now.x) / this.scale);
      }
      Object.assign(before, now);
    });
    node.addEventListener('pointerup', (event) => {
      const tapped = this.pointers.delete(event.pointerId) && !this.dragged;
      const {x, y} = this.point(event);
      if (tapped) this.hover(x, y, event);
    });
    node.addEventListener('pointercancel', (event) => this.pointers.delete(event.pointerId));
    node.addEventListener('pointerleave', (event) => {
      if (event.pointerType !== 'touch') this.leave();
    });
    node.addEventListener('blur', () => this.leave());
    node.addEventListener('keydown', (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const actions = {
        '+': () => view.zoom(1.5), '=': () => view.zoom(1.5), '-': () => view.zoom(1 / 1.5),
        '0': () => view.reset(),
        ArrowLeft: () => view.pan(-view.span / 5), ArrowRight: () => view.pan(view.span / 5),
        Escape: () => this.leave(), ...this.keys(),
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
    });
  }

  keys() {
    return {};
  }

  leave() {
    tip.hide();
  }
}
