/** Durations and sizes in the words of `monarch_kernel/display/quantities.py`. */

import { t, tn } from './translation';

/** `8 ms`, `0.2 s`, `14 s`, `3 min 5 s`, `2 h 10 min`. */
export function duration(seconds: number): string {
  if (seconds > 0 && seconds < 0.1) {
    return t('%1 ms', Math.max(1, Math.round(seconds * 1e3)));
  }
  if (seconds < 10) {
    return t('%1 s', seconds.toFixed(1));
  }
  const whole = Math.trunc(seconds);
  if (whole < 60) {
    return t('%1 s', whole);
  }
  if (whole < 3600) {
    return t('%1 min %2 s', Math.floor(whole / 60), whole % 60);
  }
  return t('%1 h %2 min', Math.floor(whole / 3600), Math.floor((whole % 3600) / 60));
}

/** A duration in whole seconds, as of what was some time ago: `0 s`, `9 s`, `3 min 5 s`. */
export function wholeDuration(seconds: number): string {
  const whole = Math.max(0, Math.trunc(seconds));
  return whole < 10 ? t('%1 s', whole) : duration(whole);
}

/** A time of today: `14:03:07`. */
export function clock(seconds: number): string {
  return new Date(seconds * 1e3).toTimeString().slice(0, 8);
}

/** The size of a process: `12 MB`, `1.4 GB`. */
export function memory(size: number): string {
  return size >= 1e9 ? t('%1 GB', (size / 1e9).toFixed(1)) : t('%1 MB', Math.round(size / 1e6));
}

/** The size of a text or a message: `120 bytes`, `14 kB`, `1.4 MB`, `2.5 GB`. */
export function textSize(size: number): string {
  if (size < 1_000) {
    return tn('%1 byte', '%1 bytes', size);
  }
  if (size < 1e6) {
    return t('%1 kB', Math.round(size / 1e3));
  }
  return size < 1e9 ? t('%1 MB', (size / 1e6).toFixed(1)) : t('%1 GB', (size / 1e9).toFixed(1));
}

/** A number of a chart or a table, short: `0`, `0.0213`, `12.4`, `1.2e+9`. */
export function figure(value: number): string {
  if (value === 0) {
    return '0';
  }
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) {
    return value.toExponential(2).replace(/\.?0+e/, 'e');
  }
  return String(Number(value.toPrecision(4)));
}
