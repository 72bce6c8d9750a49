/** How a state looks: a shape of its own in a box of 16 x 16, the same in canvases and in the page. */

import type { RankState } from '../model';

interface Glyph {
  /**
   * `solid`: a filled box, for what is to be seen first; `tint`: a light one with a line around it; `outline`,
   * `dotted`: almost only the line; `none`: no box.
   */
  readonly box: 'solid' | 'tint' | 'outline' | 'dotted' | 'none';
  /** Drawn over the box, in the colour of text on it (`solid`) or in that of the state. */
  readonly path: string;
}

export const GLYPHS: Readonly<Record<RankState, Glyph>> = {
  dead: {
    box: 'solid',
    path: 'M4.2 5.6 5.6 4.2 8 6.6l2.4-2.4 1.4 1.4L9.4 8l2.4 2.4-1.4 1.4L8 9.4l-2.4 2.4-1.4-1.4L6.6 8z'
  },
  unresponsive: { box: 'solid', path: 'M6.9 3h2.2v6.2H6.9zM6.9 10.6h2.2v2.3H6.9z' },
  stopped: { box: 'solid', path: 'M4.6 3.8h2.4v8.4H4.6zM9 3.8h2.4v8.4H9z' },
  healing: { box: 'solid', path: 'M6.9 3.5h2.2v3.4h3.4v2.2H9.1v3.4H6.9V9.1H3.5V6.9h3.4z' },
  starting: { box: 'dotted', path: 'M8 4.5A3.5 3.5 0 1 0 11.5 8H9.9A1.9 1.9 0 1 1 8 6.1z' },
  running: { box: 'tint', path: 'M5.8 4v8L12 8z' },
  idle: { box: 'outline', path: '' },
  ended: { box: 'none', path: 'M4 7.2h8v1.6H4z' }
};

/** The corner that marks a rank with modules of an older tree. */
export const OLDER_CORNER = 'M9 0h7v7z';

const SVG = 'http://www.w3.org/2000/svg';

function svgPath(d: string, name: string): SVGPathElement {
  const path = document.createElementNS(SVG, 'path');
  path.setAttribute('d', d);
  path.setAttribute('class', name);
  return path;
}

/** The picture of a state for the page; screen readers pass over it. */
export function stateIcon(state: RankState, older = false): SVGSVGElement {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('viewBox', '0 0 16 16');
  svg.setAttribute('aria-hidden', 'true');
  svg.setAttribute('class', 'mk-Icon');
  svg.setAttribute('data-state', state);
  const { box, path } = GLYPHS[state];
  if (box !== 'none') {
    const rect = document.createElementNS(SVG, 'rect');
    const edge = box === 'solid' ? 0 : 1;
    rect.setAttribute('x', String(edge));
    rect.setAttribute('y', String(edge));
    rect.setAttribute('width', String(16 - 2 * edge));
    rect.setAttribute('height', String(16 - 2 * edge));
    rect.setAttribute('rx', '3');
    rect.setAttribute('class', `mk-Icon-box mk-mod-${box}`);
    svg.append(rect);
  }
  if (path) {
    svg.append(svgPath(path, box === 'solid' ? 'mk-Icon-on' : 'mk-Icon-mark'));
  }
  if (older) {
    svg.append(svgPath(OLDER_CORNER, 'mk-Icon-older'));
  }
  return svg;
}
