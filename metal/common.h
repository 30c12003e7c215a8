// Shared by the kernel bodies; stands in front of each as its header.
//
// Eight-by-eight simdgroup matrices are read and written through thread_elements(): a lane holds the
// elements (row, column) and (row, column + 1) of matrix_row and matrix_column. All matrices are
// float, so that every product is summed in float whatever the types in memory are.

inline int matrix_row(uint lane) { return int((lane / 4 & 4) + lane / 2 % 4); }
inline int matrix_column(uint lane) { return int((lane / 4 & 2) * 2 + lane % 2 * 2); }

// The four lanes that hold one row of a matrix differ in bits 0 and 3 of their number.
inline float row_sum(float x) {
    x += simd_shuffle_xor(x, ushort(1));
    return x + simd_shuffle_xor(x, ushort(8));
}
inline float row_max(float x) {
    x = max(x, simd_shuffle_xor(x, ushort(1)));
    return max(x, simd_shuffle_xor(x, ushort(8)));
}

// Eight neighbours in memory as floats.
template <typename T>
inline void load_eight(device const T* from, thread float* to) {
    const vec<T, 4> low = *(device const vec<T, 4>*)from, high = *(device const vec<T, 4>*)(from + 4);
    for (int i = 0; i < 4; i++) {
        to[i] = float(low[i]);
        to[4 + i] = float(high[i]);
    }
}

// Columns k .. k + 7 of one weight row. BITS 0: numbers of type S in `weights`; 4 or 8: affine
// codes packed in 32-bit words, value = scale * code + bias, one scale and bias a GROUP columns.
template <typename W, typename S, int BITS, int GROUP>
inline void load_weights(device const W* weights, device const S* scales, device const S* biases,
                         size_t row, int columns, int k, thread float* to) {
    if constexpr (BITS == 0) {
        load_eight(weights + row * columns + k, to);
    } else {
        constexpr int per_word = 32 / BITS;
        constexpr uint mask = (1u << BITS) - 1;
        const size_t group = row * (columns / GROUP) + k / GROUP;
        const float scale = float(scales[group]), bias = float(biases[group]);
        device const W* words = weights + (row * columns + k) / per_word;
        for (int w = 0; w < BITS / 4; w++) {
            uint word = words[w];
            for (int i = 0; i < per_word; i++) {
                to[w * per_word + i] = scale * float(word & mask) + bias;
                word >>= BITS;
            }
        }
    }
}

// Rows of numbers that lie side by side in TAPS arrays, [rows, width] each.
template <typename X, int TAPS>
struct Inputs {
    device const X* parts[TAPS];
    int width;

    device const X* at(int row, int column) const {
        const int part = TAPS == 1 ? 0 : column / width;
        return parts[part] + size_t(row) * width + (column - part * width);
    }
};

// Eight outputs of a linear layer: its weight rows first .. first + 7, of which those from `end` on are
// not there.
template <typename W, typename S>
struct Tile {
    device const W* weights;
    device const S* scales;
    device const S* biases;
    int first, end;
};

// What multiply_rows knows of a norm of its inputs: nothing (PLAIN), its weights (WEIGHTED), or its
// weights while the sums of squares are still to be made (SQUARED).
enum Norm { PLAIN = 0, WEIGHTED = 1, SQUARED = 2 };

// Products of input rows and weight rows, for up to 8 * ROW_TILES inputs and 8 * TILES outputs:
// sums[r][t] is the matrix of rows 8r .. and the weight rows of tiles[t]. A step takes 64 columns,
// starting at `begin`, then `stride` steps further on. Within a step a lane holds eight neighbours of
// one weight row, so that packed words are opened once; column 8i + j of the step is place i of
// product j, for inputs and weights alike. Nothing here depends on the number of rows, so a row's
// sums have the same bits in whatever company it comes.
// NORM: inputs are multiplied by column_weights; SQUARED: `squares[r]` gains those of the plain inputs.
template <typename X, typename W, typename S, typename C, int BITS, int GROUP, int TAPS, int ROW_TILES,
          int TILES, int NORM>
inline void multiply_rows(thread const Inputs<X, TAPS>& x, int rows, thread const Tile<W, S> (&tiles)[TILES],
                          int columns, int begin, int stride, device const C* column_weights, uint lane,
                          thread simdgroup_float8x8 (&sums)[ROW_TILES][TILES],
                          thread float (&squares)[ROW_TILES]) {
    const int row = matrix_row(lane), column = matrix_column(lane);
    for (int r = 0; r < ROW_TILES; r++) {
        squares[r] = 0;
        for (int t = 0; t < TILES; t++) sums[r][t] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    }
    for (int step = begin * 64; step < columns; step += stride * 64) {
        float inputs[ROW_TILES][2][8];
        for (int r = 0; r < ROW_TILES; r++) {
            for (int e = 0; e < 2; e++) {
                const int k = step + 8 * (column + e);
                thread float* eight = inputs[r][e];
                for (int i = 0; i < 8; i++) eight[i] = 0;
                if (8 * r + row >= rows || k >= columns) continue;
                load_eight(x.at(8 * r + row, k), eight);
                if constexpr (NORM != PLAIN) {
                    float weight[8];
                    load_eight(column_weights + k, weight);
                    for (int i = 0; i < 8; i++) {
                        if (NORM == SQUARED) squares[r] += eight[i] * eight[i];
                        eight[i] *= weight[i];
                    }
                }
            }
        }
        for (int t = 0; t < TILES; t++) {
            float opened[2][8];
            for (int e = 0; e < 2; e++) {
                const int output = tiles[t].first + column + e, k = step + 8 * row;
                for (int i = 0; i < 8; i++) opened[e][i] = 0;
                if (output < tiles[t].end && k < columns)
                    load_weights<W, S, BITS, GROUP>(tiles[t].weights, tiles[t].scales, tiles[t].biases,
                                                    size_t(output), columns, k, opened[e]);
            }
            for (int j = 0; j < 8; j++) {
                simdgroup_float8x8 right;
                right.thread_elements()[0] = opened[0][j];
                right.thread_elements()[1] = opened[1][j];
                for (int r = 0; r < ROW_TILES; r++) {
                    simdgroup_float8x8 left;
                    left.thread_elements()[0] = inputs[r][0][j];
                    left.thread_elements()[1] = inputs[r][1][j];
                    simdgroup_multiply_accumulate(sums[r][t], left, right, sums[r][t]);
                }
            }
        }
    }
    for (int r = 0; r < ROW_TILES; r++) squares[r] = row_sum(squares[r]);
}

// A simdgroup's products into its part [rows of ROW_TILES][outputs of TILES] of threadgroup memory,
// `width` floats a row.
template <int ROW_TILES, int TILES>
inline void store_products(thread simdgroup_float8x8 (&sums)[ROW_TILES][TILES], threadgroup float* to,
                           int width, uint lane) {
    const int row = matrix_row(lane), column = matrix_column(lane);
    for (int r = 0; r < ROW_TILES; r++)
        for (int t = 0; t < TILES; t++)
            for (int e = 0; e < 2; e++)
                to[(8 * r + row) * width + 8 * t + column + e] = sums[r][t].thread_elements()[e];
}

// The sum of `count` numbers, `step` apart, in their order.
inline float sum_in_order(threadgroup const float* from, int count, int step) {
    float sum = from[0];
    for (int i = 1; i < count; i++) sum += from[i * step];
    return sum;
}

// A learned logit that takes part in a softmax and has no value: what was summed keeps `kept`.
inline void add_sink(float sink, thread float& highest, thread float& weight, thread float& kept) {
    const float higher = max(highest, sink);
    kept = exp(highest - higher);
    weight = weight * kept + exp(sink - higher);
    highest = higher;
}
