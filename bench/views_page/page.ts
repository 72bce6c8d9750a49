/** The page that is measured and looked at: the views of a simulated mesh; `window.bench` drives it. */

import { FeedClient } from "../../labextension/src/model";
import {
  HostsTable,
  LineChart,
  LogView,
  MeshBoard,
} from "../../labextension/src/views";
import css from "../../labextension/src/views/views.css";
import { SimulatedKernel } from "./simulated";

function nextFrame(): Promise<number> {
  return new Promise((resolve) => requestAnimationFrame(resolve));
}

/** After the page has been painted: a task behind the frame that paints. */
async function painted(): Promise<void> {
  await nextFrame();
  await new Promise((resolve) => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => resolve(undefined);
    channel.port2.postMessage(0);
  });
}

function clean(): HTMLElement {
  const host = document.getElementById("host") as HTMLElement;
  host.replaceChildren();
  return host;
}

/** A board of a mesh, and its simulated kernel. */
function open(ranks: number, hosts: number, troubled = true) {
  const kernel = new SimulatedKernel(ranks, hosts, troubled);
  const client = new FeedClient((message) => kernel.take(message));
  kernel.receive = (message) => client.receive(message);
  const board = new MeshBoard(clean(), client.store, client, {
    connection: client,
  });
  return { kernel, client, board };
}

type Opened = ReturnType<typeof open>;
let opened: Opened | undefined;

const bench = {
  /** Show a mesh; the result can be driven by the functions below. */
  show(ranks: number, hosts: number, troubled = true): void {
    opened?.board.dispose();
    opened?.client.dispose();
    opened = open(ranks, hosts, troubled);
    opened.client.receive(opened.kernel.snapshot());
    opened.client.setVisible(true);
  },

  opened: () => opened,

  /** From a snapshot as JSON text until it is painted (ms). */
  async firstPaint(ranks: number, hosts: number): Promise<number> {
    opened?.board.dispose();
    opened?.client.dispose();
    const text = JSON.stringify(new SimulatedKernel(ranks, hosts).snapshot());
    opened = open(ranks, hosts);
    await painted();
    const start = performance.now();
    opened.client.receive(JSON.parse(text));
    await painted();
    return performance.now() - start;
  },

  /** From a message that a rank died until it is painted (ms). */
  async changePaint(): Promise<number> {
    if (!opened) {
      return NaN;
    }
    await painted();
    const text = JSON.stringify(opened.kernel.kill(20));
    const start = performance.now();
    opened.client.receive(JSON.parse(text));
    await painted();
    return performance.now() - start;
  },

  /** Scroll all cells for some seconds while `share` of the ranks change five times a second: times of frames (ms). */
  async scroll(
    seconds: number,
    share: number,
    selector = ".mk-Cells",
  ): Promise<number[]> {
    const area = document.querySelector(selector) as HTMLElement;
    const feed = opened;
    const timer =
      feed && share
        ? setInterval(() => feed.client.receive(feed.kernel.change(share)), 200)
        : undefined;
    const frames: number[] = [];
    let last = await nextFrame();
    const end = last + seconds * 1e3;
    let step = 24;
    while (last < end) {
      area.scrollTop += step;
      if (
        area.scrollTop + area.clientHeight >= area.scrollHeight - 1 ||
        area.scrollTop <= 0
      ) {
        step = -step;
      }
      const now = await nextFrame();
      frames.push(now - last);
      last = now;
    }
    clearInterval(timer);
    return frames;
  },

  /** What the page's main thread spends on `count` messages of changes (ms each, painting by the canvas with it). */
  async changeCost(count: number, share: number): Promise<number> {
    if (!opened) {
      return NaN;
    }
    let spent = 0;
    for (let index = 0; index < count; index++) {
      const message = opened.kernel.change(share);
      await nextFrame();
      const start = performance.now();
      opened.client.receive(message);
      opened.board.update();
      spent += performance.now() - start;
    }
    return spent / count;
  },

  log(lines: number): void {
    opened?.board.dispose();
    const host = clean();
    const box = host.appendChild(document.createElement("div"));
    box.style.height = "420px";
    const kernel = new SimulatedKernel(64, 8);
    const client = new FeedClient((message) => kernel.take(message));
    kernel.receive = (message) => client.receive(message);
    const view = new LogView(box, client, { mesh: "m1" });
    view.append(kernel.lines(lines));
  },

  chart(ranks: number, points: number): void {
    opened?.board.dispose();
    const chart = new LineChart(clean(), "loss");
    let noise = 1;
    const random = () => (noise = (noise * 16807) % 2147483647) / 2147483647;
    for (let at = 0; at < points; at++) {
      const values = Array.from(
        { length: ranks },
        (_, rank): [number, number | null] => {
          const value =
            3 * Math.exp(-at / 80) +
            0.4 +
            random() * 0.06 +
            (rank === 5 && at > points * 0.7 ? 1.4 : 0);
          return [
            rank,
            rank === 2 && at > points - 5 && ranks > 8 ? null : value,
          ];
        },
      );
      chart.push(1_700_000_000 + at, values);
    }
  },

  hosts(count: number): void {
    opened?.board.dispose();
    const kernel = new SimulatedKernel(count * 8, count);
    const client = new FeedClient((message) => kernel.take(message));
    const host = clean();
    const box = host.appendChild(document.createElement("div"));
    new HostsTable(box, client.store);
    client.receive(kernel.snapshot());
  },
};

declare global {
  interface Window {
    bench: typeof bench;
  }
}

const style = document.createElement("style");
style.textContent = css;
document.head.append(style);
window.bench = bench;
