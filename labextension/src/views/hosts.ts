import type { HostView, MeshStore } from '../model';
import { memory, STATES, stateName, t } from '../model';
import { element, FrameTask, setAttribute, setCutText } from './dom';
import { stateIcon } from './glyphs';
import { Theme } from './theme';

/** A table of hosts: their ranks, processors, memory and GPUs. */
export class HostsTable {
  // Scrolls sideways where it is narrow, so keys must reach it.
  readonly node = element('div', 'mk-View mk-Hosts', { tabindex: 0, role: 'region' });
  private readonly _rows = element('tbody');
  private readonly _byKey = new Map<string, { row: HTMLTableRowElement; look: string }>();
  private readonly _frame = new FrameTask(() => this.update());
  private readonly _theme: Theme;
  private readonly _unsubscribe: () => void;

  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore
  ) {
    const head = element('tr');
    for (const name of [t('Host'), t('Ranks'), t('Processors'), t('Memory'), t('GPUs')]) {
      head.append(element('th', '', { scope: 'col' }, name));
    }
    const table = element('table', 'mk-Table', {}, element('thead', '', {}, head), this._rows);
    this.node.setAttribute('aria-label', t('Hosts'));
    this.node.append(table);
    host.append(this.node);
    this._theme = new Theme(this.node, () => undefined);
    this._unsubscribe = this._store.subscribe(() => this._frame.request());
    this.update();
  }

  update(): void {
    const ranks = new Map<string, { total: number; worst: number }>();
    for (const mesh of this._store.meshes.keys()) {
      for (const { host, state } of this._store.ranks(mesh)) {
        const known = ranks.get(host) ?? { total: 0, worst: STATES.length };
        known.total++;
        known.worst = Math.min(known.worst, STATES.indexOf(state));
        ranks.set(host, known);
      }
    }
    for (const [key, { row }] of this._byKey) {
      if (!this._store.hosts.has(key)) {
        row.remove();
        this._byKey.delete(key);
      }
    }
    for (const host of this._store.hosts.values()) {
      this._show(host, ranks.get(host.key) ?? { total: 0, worst: STATES.length });
    }
  }

  dispose(): void {
    this._frame.cancel();
    this._unsubscribe();
    this._theme.dispose();
    this.node.remove();
  }

  private _show(host: HostView, { total, worst }: { total: number; worst: number }): void {
    let known = this._byKey.get(host.key);
    if (!known) {
      const row = this._rows.insertRow();
      row.append(
        element('th', '', { scope: 'row' }),
        element('td', '', {}, element('span', 'mk-Hosts-icon'), element('span')),
        meterCell(),
        meterCell(),
        meterCell()
      );
      known = { row, look: '' };
      this._byKey.set(host.key, known);
    }
    const [name, states, cpu, use, gpus] = known.row.cells;
    if (!name || !states || !cpu || !use || !gpus) {
      return;
    }
    setCutText(name, host.name || host.key);
    setAttribute(known.row, 'data-gone', host.gone || undefined);
    setAttribute(known.row, 'title', host.gone || undefined);
    const state = STATES[worst];
    const look = host.gone ? 'gone' : (state ?? '');
    const [icon, text] = states.children as unknown as [HTMLElement, HTMLElement];
    if (look !== known.look) {
      known.look = look;
      icon.replaceChildren(...(state ? [stateIcon(host.gone ? 'dead' : state)] : []));
      setAttribute(icon, 'title', state ? stateName(state) : undefined);
    }
    setCutText(text, host.gone ? t('unreachable') : String(total));
    setMeter(cpu, host.cpu / 100, host.cores ? t('%1 % of %2', Math.round(host.cpu), host.cores) : '–');
    setMeter(
      use,
      host.memory_total ? host.memory_used / host.memory_total : 0,
      host.memory_total ? t('%1 of %2', memory(host.memory_used), memory(host.memory_total)) : '–'
    );
    const busy = host.gpus.reduce((sum, gpu) => sum + gpu.use, 0) / (host.gpus.length || 1);
    setMeter(gpus, busy / 100, host.gpus.length ? t('%1 % of %2', Math.round(busy), host.gpus.length) : '–');
    setAttribute(
      gpus,
      'title',
      host.gpus
        .map(({ index, name, use, memory_used: used, memory_total: size }) =>
          t('GPU %1, %2: %3 %, %4 of %5', index, name, Math.round(use), memory(used), memory(size))
        )
        .join('\n') || undefined
    );
  }
}

function meterCell(): HTMLTableCellElement {
  const bar = element('span', 'mk-Meter', { 'aria-hidden': 'true' }, element('span', 'mk-Meter-fill'));
  return element('td', '', {}, element('span', 'mk-Meter-text'), bar);
}

function setMeter(cell: HTMLTableCellElement, share: number, text: string): void {
  const [label, bar] = cell.children as unknown as [HTMLElement, HTMLElement];
  setCutText(label, text);
  const fill = bar.firstElementChild as HTMLElement;
  const width = `${Math.round(Math.min(1, Math.max(0, share)) * 100)}%`;
  if (fill.style.width !== width) {
    fill.style.width = width;
  }
}
