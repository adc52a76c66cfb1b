#!/bin/sh
cat > /srv/shop/report.sql <<'END'
WITH RECURSIVE
span AS (SELECT min(substr(placed_on, 1, 7)) AS first, max(substr(placed_on, 1, 7)) AS last FROM orders),
months (month) AS (
    SELECT first FROM span WHERE first IS NOT NULL
    UNION ALL
    SELECT strftime('%Y-%m', month || '-01', '+1 month') FROM months, span WHERE month < last
),
counted AS (
    SELECT id, customer, substr(placed_on, 1, 7) AS month FROM orders WHERE status IN ('paid', 'shipped')
),
worth AS (
    SELECT
        month,
        (SELECT coalesce(sum(quantity * cents), 0) FROM lines WHERE order_id = counted.id)
        - (SELECT coalesce(sum(cents), 0) FROM refunds WHERE order_id = counted.id) AS cents
    FROM counted
),
firsts AS (SELECT customer, min(month) AS month FROM counted GROUP BY customer),
sold AS (
    SELECT month, sku, sum(quantity) AS pieces FROM counted JOIN lines ON order_id = counted.id GROUP BY month, sku
)
SELECT
    month,
    (SELECT count(*) FROM worth WHERE worth.month = months.month),
    (SELECT coalesce(sum(cents), 0) FROM worth WHERE worth.month = months.month),
    (SELECT count(*) FROM firsts WHERE firsts.month = months.month),
    (SELECT sku FROM sold WHERE sold.month = months.month ORDER BY pieces DESC, sku LIMIT 1)
FROM months
ORDER BY month;
END
