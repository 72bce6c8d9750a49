import { outputsPlugin } from './jupyter/outputs';
import { panelPlugin } from './jupyter/plugin';

export default [panelPlugin, outputsPlugin];
