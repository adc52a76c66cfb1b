CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    customer INTEGER NOT NULL REFERENCES customers (id),
    placed_on TEXT NOT NULL, -- YYYY-MM-DD
    status TEXT NOT NULL -- open, paid, shipped, cancelled
);
CREATE TABLE lines (
    order_id INTEGER NOT NULL REFERENCES orders (id),
    sku TEXT NOT NULL,
    quantity INTEGER NOT NULL,
    cents INTEGER NOT NULL -- of one piece
);
CREATE TABLE refunds (order_id INTEGER NOT NULL REFERENCES orders (id), cents INTEGER NOT NULL);
