INSERT INTO customers VALUES (1, 'Ash'), (2, 'Birch'), (3, 'Cedar');
INSERT INTO orders VALUES
    (1, 1, '2023-11-03', 'shipped'), (2, 1, '2023-11-20', 'cancelled'), (3, 2, '2023-11-28', 'paid'),
    (4, 1, '2024-02-01', 'paid'), (5, 3, '2024-02-14', 'open'), (6, 2, '2024-02-29', 'shipped');
INSERT INTO lines VALUES
    (1, 'glass', 2, 1500), (1, 'frame', 1, 4000), (2, 'glass', 9, 1500), (3, 'seeds', 4, 250),
    (4, 'seeds', 3, 250), (4, 'frame', 3, 4000), (5, 'glass', 50, 1500);
INSERT INTO refunds VALUES (1, 500), (1, 250), (3, 1000);
