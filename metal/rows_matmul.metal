// y = x W^T (+ bias) for the few rows of one decoding step: the drafter's fc over newly committed
// features, and every linear layer of exact mode. Each weight is read once for all rows; the sum over
// columns has one fixed order, so a row's result does not depend on the rows beside it.
//
// A threadgroup makes 8 * TILES outputs of all rows; its SIMDS simdgroups take every SIMDS-th step of
// 64 columns and add up in order of their number.

threadgroup float partial[SIMDS][ROW_TILES * 8][TILES * 8];
const int rows = x_shape[0], columns = x_shape[1], outputs = weights_shape[0];
const int first = int(threadgroup_position_in_grid.x) * TILES * 8;
const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;

simdgroup_float8x8 sums[ROW_TILES][TILES];
float squares[ROW_TILES];
for (int r = 0; r < ROW_TILES; r++) {
    squares[r] = 0;
    for (int t = 0; t < TILES; t++) sums[r][t] = make_filled_simdgroup_matrix<float, 8>(0.0f);
}
multiply_rows<X, W, S, S, BITS, GROUP, ROW_TILES, TILES, false>(
    x, rows, size_t(x_strides[0]), weights, scales, biases, first, outputs, columns, int(simd), SIMDS,
    scales, lane, sums, squares);

const int row = matrix_row(lane), column = matrix_column(lane);
for (int r = 0; r < ROW_TILES; r++)
    for (int t = 0; t < TILES; t++)
        for (int e = 0; e < 2; e++)
            partial[simd][8 * r + row][8 * t + column + e] = sums[r][t].thread_elements()[e];
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int i = int(thread_index_in_threadgroup); i < rows * TILES * 8; i += SIMDS * 32) {
    const int m = i / (TILES * 8), n = i % (TILES * 8);
    if (first + n >= outputs) continue;
    float sum = partial[0][m][n];
    for (int s = 1; s < SIMDS; s++) sum += partial[s][m][n];
    if (BIAS) sum += float(bias[first + n]);
    y[size_t(m) * outputs + first + n] = Y(sum);
}
