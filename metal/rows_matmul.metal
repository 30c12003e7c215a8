// y = x W^T (+ bias) for the few rows of one decoding step: a drafter's layers, and every linear layer
// of exact mode. Each weight is read once for all rows; the sum over columns has one fixed order, so
// a row's result does not depend on the rows beside it.
//
// NORM: x is normed first, with the norm's weights folded into the columns and 1 / rms of a row into its
// sums. GATED: y = silu(x W^T) * (x U^T), the first half of an MLP. RESIDUAL: y gets it added.
//
// A threadgroup makes 8 * TILES outputs of all rows (GATED: 8, of both matrices); its SIMDS simdgroups
// take every SIMDS-th step of 64 columns and add up in order of their number.

constexpr int WIDTH = TILES * 8, HEIGHT = ROW_TILES * 8, MADE = GATED ? 8 : WIDTH;
threadgroup float partial[SIMDS][HEIGHT][WIDTH];
threadgroup float square_sums[SIMDS][HEIGHT];
const int rows = x_shape[0], columns = x_shape[1], outputs = weights_shape[0];
const int first = int(threadgroup_position_in_grid.x) * MADE;
const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;

Inputs<X, 1> inputs;
inputs.width = columns;
inputs.parts[0] = x;
Tile<W, S> tiles[TILES];
for (int t = 0; t < TILES; t++) {
    if (GATED && t == 1) tiles[t] = {up, up_scales, up_biases, first, outputs};
    else tiles[t] = {weights, scales, biases, first + 8 * t, outputs};
}

simdgroup_float8x8 sums[ROW_TILES][TILES];
float squares[ROW_TILES];
multiply_rows<X, W, S, C, BITS, GROUP, 1, ROW_TILES, TILES, NORM>(
    inputs, rows, tiles, columns, int(simd), SIMDS, norm, lane, sums, squares);
store_products<ROW_TILES, TILES>(sums, &partial[simd][0][0], WIDTH, lane);
if (NORM && matrix_column(lane) == 0)
    for (int r = 0; r < ROW_TILES; r++) square_sums[simd][8 * r + matrix_row(lane)] = squares[r];
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int i = int(thread_index_in_threadgroup); i < rows * MADE; i += SIMDS * 32) {
    const int m = i / MADE, n = i % MADE;
    if (first + n >= outputs) continue;
    float scale = 1;
    if (NORM)
        scale = rsqrt(sum_in_order(&square_sums[0][m], SIMDS, HEIGHT) / float(columns) + norm_eps);
    float sum = sum_in_order(&partial[0][m][n], SIMDS, HEIGHT * WIDTH) * scale;
    if (BIAS) sum += float(bias[first + n]);
    if (GATED) {
        const float other = sum_in_order(&partial[0][m][n + 8], SIMDS, HEIGHT * WIDTH) * scale;
        sum = sum / (1.0f + exp(-sum)) * other;
    }
    const size_t place = size_t(m) * outputs + first + n;
    if (RESIDUAL) sum += float(residual[place]);
    y[place] = Y(sum);
}
